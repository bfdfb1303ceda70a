"""Words of a shell script, of which nothing is run: plain assignments are resolved, what a script computes stays."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

_COMPUTED = re.compile(r"\$\(\([^()]*\)\)|\$\([^()]*\)|`[^`]*`")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\})")
_OPENING = ("if", "for", "while", "until", "case", "{")
_CLOSING = ("fi", "done", "esac", "}")
_BEFORE = ("then", "do", "else", "elif", "time", "!", "export", "declare", "local", "readonly", "typeset")
_SEPARATORS = ";&|()<>\n"
_SEVERAL = re.compile(r"(^|\s)(--\S+|\+{0,2}\w+(\.\w+)+=\S*)\s|\s--")
"""Of a text that is several words: flags, or overrides of verl's."""


@dataclass
class Script:
    """What a script says.

    Attributes:
        statements: words of each command and array, and whether it is reached under a condition alone.
        variables: values of plain assignments; with a ``$`` in them where they are not known.
    """

    statements: list[tuple[list[str], bool]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def read(self, text: str, folder: Path) -> Script:
        """Read a text, and the files in its folder or below that it sources.

        Raises:
            ValueError: a quotation is not closed.
        """
        depth, conditional, in_array = 0, False, False
        words: list[str] = []
        for token in [*_tokens(text), "\n"]:
            if token.strip(_SEPARATORS):
                words.append(token)
            elif not in_array or ")" in token:
                while not in_array and words and (words[0] in _BEFORE or words[0] in (*_OPENING, *_CLOSING)):
                    first = words.pop(0)
                    depth += (first in _OPENING) - (first in _CLOSING)
                    words = words[1:] if words and re.fullmatch("-[a-zA-Z]+", words[0]) else words
                if words[:1] == ["function"]:
                    words = words[2:]
                    depth += 1
                in_array = token.startswith("(") and bool(words) and words[-1].endswith("=") and ")" not in token
                self._take(words, depth > 0 or conditional, folder)
                words = []
                if not in_array:
                    conditional = token in ("&&", "||") or (conditional and not {*token} & {*";\n"})
        return self

    def _take(self, words: list[str], conditional: bool, folder: Path) -> None:
        while words and (found := _ASSIGNMENT.fullmatch(words[0])):
            name, value = found[1], self.expand(found[2])
            is_known = not conditional or self.variables.get(name) == value
            self.variables[name] = value if is_known else f"${name}"
            words = [value, *words[1:]] if _SEVERAL.search(value) else words[1:]
        if words[:1] in (["source"], ["."]) and len(words) > 1:
            file = folder / self.expand(re.sub(r"^\$\{?\w+\}?/", "", words[1]))
            if "$" not in str(file) and file.is_file():
                self.read(file.read_text(errors="replace"), folder)
        elif words:
            expanded = map(self.expand, words)
            parts = [one.split() if _SEVERAL.search(one) else [one] for one in expanded if one]
            self.statements.append(([word for part in parts for word in part], conditional))

    def expand(self, word: str) -> str:
        """A word with the values of its variables, as far as they are known."""

        def value(found: re.Match[str]) -> str:
            known = self.variables.get(found[1] or found[2])
            return found[0] if known is None and found[3] is None else known or self.expand(found[3] or "")

        return _VARIABLE.sub(value, word)


def _tokens(text: str) -> shlex.shlex:
    """Words and separators; what a script computes is ``$COMPUTED``."""
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text.replace("\\\n", " "))
    before = ""
    while before != text:
        before, text = text, _COMPUTED.sub("$COMPUTED", text)
    found = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    found.whitespace, found.commenters, found.whitespace_split = " \t\r", "", True
    return found
