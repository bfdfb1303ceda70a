"""Reads a shell script as far as a recipe needs it: which words its commands get.

Variables, arrays and arithmetic of constants are resolved, conditions on constants are followed, files that a script
sources are read where they lie beside it. Nothing is run. What only a running script knows stays in a word, enclosed in
marks.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .base import MARK

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_DEFINED = re.compile(r"\(\s*\)")
_KEYWORDS = ("then", "do", "else", "{", "}", "!", "time", "elif")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|\d|[@*#?])(\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
_PLAIN = re.compile(r"[A-Za-z_]\w*|\d|[@*#?]")
_COMPARED: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "-eq": lambda left, right: int(left) == int(right),
    "-ne": lambda left, right: int(left) != int(right),
    "-gt": lambda left, right: int(left) > int(right),
    "-ge": lambda left, right: int(left) >= int(right),
    "-lt": lambda left, right: int(left) < int(right),
    "-le": lambda left, right: int(left) <= int(right),
}
_DEEPEST = 8
"""Files that source, and functions that call, each other."""
_GLOB = re.compile(r"[*?[]")


@dataclass(frozen=True)
class Statement:
    """One command or assignment, its words with quotes as written.

    Args:
        array: name of the array that the words are given to, with a ``+`` if they are appended; empty: a command.
        conditional: it follows ``&&`` or ``||``.
        function: name of the function whose body begins after it; empty: none does.
    """

    words: tuple[str, ...]
    array: str = ""
    conditional: bool = False
    function: str = ""


@dataclass
class Script:
    """What a script's commands get, and what its variables end as.

    Attributes:
        commands: words of each command, in order, without quotes.
        variables: words of each variable, one for a plain one.
    """

    folder: Path
    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    _branches: list[_Branch] = field(default_factory=list)
    _functions: dict[str, _Function] = field(default_factory=dict)
    _defined: _Function | None = None
    _depth: int = 0

    def read(self, text: str) -> Script:
        """Follow all statements of a text."""
        for statement in statements(text):
            self._follow(statement)
        return self

    def _follow(self, statement: Statement) -> None:
        words = list(statement.words)
        if self._defined is not None:
            if not self._defined.goes_on_after(statement):
                self._defined = None
            return
        if statement.function:
            self._defined = _Function(runs=self._runs)
            if self._runs is not False:
                self._functions[statement.function] = self._defined
            return
        if words[:1] == ["function"] and len(words) > 1:
            self._follow(replace(statement, words=(), function=words[1]))
            self._follow(replace(statement, words=tuple(words[2:])))
            return
        if statement.array:
            self._assign_array(statement)
            return
        while words and words[0] in _KEYWORDS:
            keyword = words.pop(0)
            if keyword == "else" and self._branches:
                self._branches[-1].go_on(True)
            elif keyword == "elif" and self._branches:
                self._branches[-1].go_on(self._holds(words))
                return
        if not words:
            return
        first = words[0]
        if first == "if":
            self._branches.append(_Branch(self._holds(words[1:])))
        elif first in ("for", "while", "until", "case"):
            self._branches.append(_Branch(None))
        elif first in ("fi", "done", "esac"):
            if self._branches:
                self._branches.pop()
        elif first in ("[", "[[") and self._branches and statement.conditional:
            self._branches[-1].active = None  # a condition of several parts
        elif self._runs is not False:
            self._run(words, self._runs is None or statement.conditional)

    @property
    def _runs(self) -> bool | None:
        """Whether the statement here is reached; None: not known."""
        states = [branch.active for branch in self._branches]
        return False if False in states else None if None in states else True

    def _run(self, words: list[str], uncertain: bool) -> None:
        if words[0] in _DECLARING:
            words = [word for word in words[1:] if not word.startswith("-")]
        rest = list(words)
        while rest and (found := _ASSIGNMENT.fullmatch(rest[0])):
            if all(_ASSIGNMENT.fullmatch(word) for word in words):
                name, plus, value = found.groups()
                added = "".join(self._expand(value, split=False))
                self._set(name, [("".join(self.variables.get(name, [])) if plus else "") + added], uncertain)
            rest.pop(0)
        if not rest:
            return
        expanded = [one for word in rest for one in self._expand(word)]
        if not expanded:
            return
        first, *arguments = expanded
        if first in ("source", "."):
            self._source(arguments[:1])
        elif first == "unset":
            for name in arguments:
                if not name.startswith("-"):
                    self._set(name, [], uncertain)
        elif first in self._functions:
            self._call(self._functions[first], arguments, uncertain)
        else:
            self.commands.append(expanded)

    def _call(self, function: _Function, arguments: Sequence[str], uncertain: bool) -> None:
        """Follow a function's body where it is called, with its arguments as ``$1``, ``$2``, ..."""
        if self._depth >= _DEEPEST:
            return
        outer = {name: words for name, words in self.variables.items() if name.isdigit()}
        self.variables |= {str(number): [word] for number, word in enumerate(arguments, 1)}
        branches, self._branches = self._branches, []
        if uncertain or function.runs is None:
            self._branches.append(_Branch(None))
        self._depth += 1
        for statement in function.body:
            self._follow(statement)
        self._depth -= 1
        self._branches = branches
        for number in range(1, len(arguments) + 1):
            self.variables.pop(str(number), None)
        self.variables |= outer

    def _assign_array(self, statement: Statement) -> None:
        if self._runs is False:
            return
        uncertain = self._runs is None or statement.conditional
        words = [one for word in statement.words for one in self._expand(word)]
        name = statement.array.rstrip("+")
        before = self.variables.get(name, []) if statement.array.endswith("+") else []
        self._set(name, [*before, *words], uncertain)

    def _set(self, name: str, words: list[str], uncertain: bool) -> None:
        if uncertain and (name not in self.variables or self.variables[name] != words):
            words = [*self.variables.get(name, []), f"{MARK}${{{name}[@]}}{MARK}"]
            if len(words) == 2 and not any(word.startswith("--") for word in words):
                words = [f"{MARK}${{{name}}}{MARK}"]
        self.variables[name] = words

    def _source(self, path: list[str]) -> None:
        for word in path:
            file = self.folder / word.rpartition(MARK)[2].lstrip("/") if MARK in word else self.folder / word
            if self._depth < _DEEPEST and file.is_file():
                self._depth += 1
                self.read(file.read_text(errors="replace"))
                self._depth -= 1

    def _holds(self, words: list[str]) -> bool | None:
        """Whether a test of constants holds; None: not known."""
        if len(words) < 3 or words[0] not in ("[", "[["):
            return None
        inner = ["".join(self._expand(word, split=False)) for word in words[1:-1]]
        if any(MARK in word for word in inner):
            return None
        if len(inner) == 2 and inner[0] in ("-z", "-n"):
            return (inner[1] == "") == (inner[0] == "-z")
        if len(inner) != 3 or inner[1] not in _COMPARED:
            return None
        if words[0] == "[[" and inner[1] in ("=", "==", "!=") and _GLOB.search(inner[2]):
            return _is_like(inner[0], words[3], inner[2], inner[1] != "!=")
        try:
            return _COMPARED[inner[1]](inner[0], inner[2])
        except ValueError:
            return None

    def _expand(self, word: str, split: bool = True) -> list[str]:
        """The words that one word with quotes and variables becomes."""
        parts: list[str] = [""]
        begun = False
        position = 0
        quoted = False
        while position < len(word):
            character = word[position]
            if character == "'" and not quoted:
                end = word.find("'", position + 1)
                end = len(word) if end < 0 else end
                parts[-1] += word[position + 1 : end]
                begun, position = True, end + 1
            elif character == '"':
                quoted, begun, position = not quoted, True, position + 1
            elif character == "\\" and position + 1 < len(word):
                following = word[position + 1]
                parts[-1] += "" if following == "\n" else following
                begun, position = True, position + 2
            elif character in "$`":
                end = _end_of_expansion(word, position)
                values, is_list = self._value(word[position:end])
                position = end
                if is_list or (split and not quoted):
                    fields = values if is_list and quoted else [one for value in values for one in value.split()]
                    if fields:
                        parts[-1] += fields[0]
                        parts.extend(fields[1:])
                        begun = True
                else:
                    parts[-1] += " ".join(values)
            else:
                parts[-1] += character
                begun, position = True, position + 1
        return parts if begun or len(parts) > 1 or not split else []

    def _value(self, text: str) -> tuple[list[str], bool]:
        """Of an expansion as written: its words, and whether each is a word of its own also in quotes."""
        unknown = [f"{MARK}{text}{MARK}"]
        if text.startswith("$(("):
            result = _calculated("".join(self._expand(_with_dollars(text[3:-2]), split=False)))
            return ([str(result)] if result is not None else unknown), False
        if text.startswith(("$(", "`")) or len(text) == 1:
            return (unknown, False) if len(text) > 1 else ([text], False)
        found = _PARAMETER.fullmatch(text[2:-1] if text.startswith("${") else text[1:])
        if found is None:
            return unknown, False
        name, whole, rule, default = found.groups()
        if name in "@*":
            return [], True
        words = self.variables.get(name)
        if rule and (not words or (rule.startswith(":") and not any(words))):
            return self._expand(default, split=False), False
        if words is None:
            return unknown, False
        return (words, True) if whole else (words[:1] or [""], False)


@dataclass
class _Function:
    """A function of a script. Its body is followed where it is called.

    Attributes:
        runs: whether its definition is reached; None: not known.
        body: statements between its braces.
    """

    runs: bool | None
    body: list[Statement] = field(default_factory=list)
    _open: int = 0

    def goes_on_after(self, statement: Statement) -> bool:
        """Take the next statement of the body; False: its last brace closes here."""
        self.body.append(statement)
        for word in () if statement.array else statement.words:
            if word not in _KEYWORDS:
                break
            self._open += (word == "{") - (word == "}")
        return self._open > 0


@dataclass
class _Branch:
    """An ``if``, loop or ``case`` that is open: whether its present part runs, None where that is not known."""

    active: bool | None
    _settled: bool | None = field(init=False)

    def __post_init__(self) -> None:
        self._settled = self.active

    def go_on(self, holds: bool | None) -> None:
        """The next part, whose own condition is ``holds``."""
        if self._settled is True:
            self.active = False
        elif self._settled is None:
            self.active = None
        else:
            self.active = self._settled = holds


def statements(text: str) -> Iterator[Statement]:
    """The statements of a script, comments left out."""
    words: list[str] = []
    word, array, array_words = "", "", list[str]()
    position, conditional = 0, False
    while position <= len(text):
        character = text[position] if position < len(text) else "\n"
        if character == "\\" and text[position + 1 : position + 2] == "\n":
            position += 2
            if word:
                (array_words if array else words).append(word)
                word = ""
            continue
        end = _end_of_piece(text, position)
        if end > position:
            word += text[position:end]
            position = end
            continue
        if character == "#" and not word:
            newline = text.find("\n", position)
            position = len(text) if newline < 0 else newline
            continue
        defined = _DEFINED.match(text, position) if character == "(" and not array else None
        named = [*words, word] if word else words
        if defined is not None and named and named[:-1] in ([], ["function"]) and _NAME.fullmatch(named[-1]):
            yield Statement((), function=named[-1])
            words, word, position = [], "", defined.end()
            continue
        position += 1
        opened = _ASSIGNMENT.fullmatch(word) if character == "(" and not array else None
        if opened is not None and not opened[3]:
            array, word = opened[1] + opened[2], ""
            if words and words[-1] in _KEYWORDS:
                yield Statement(tuple(words), "", conditional)
                words, conditional = [], False
        elif character in " \t\r\n;|&()<>" and not (character in "&>" and text[position - 2 : position - 1] in ("&>")):
            if word:
                (array_words if array else words).append(word)
                word = ""
            if array and character == ")":
                yield Statement(tuple(array_words), array, conditional)
                array, array_words = "", []
                words = [one for one in words if one not in _DECLARING and not one.startswith("-")]
            elif not array and character in "\n;|&()":
                if words:
                    yield Statement(tuple(words), "", conditional)
                    words = []
                    conditional = False
                conditional = (conditional or text[position - 1 : position + 1] in ("&&", "||")) and character != "\n"
        else:
            word += character


def _end_of_piece(text: str, position: int) -> int:
    """The end of a quoted or escaped piece or an expansion that begins here; ``position``: none does."""
    character = text[position : position + 1]
    if character == "'":
        end = text.find("'", position + 1)
        return len(text) if end < 0 else end + 1
    if character == '"':
        here = position + 1
        while here < len(text) and text[here] != '"':
            here = here + 2 if text[here] == "\\" else max(_end_of_expansion(text, here), here + 1)
        return min(here + 1, len(text))
    if character == "\\":
        return min(position + 2, len(text))
    return _end_of_expansion(text, position)


def _end_of_expansion(text: str, position: int) -> int:
    """The end of ``$name``, ``${...}``, ``$(...)`` or ``$((...))``; ``position``: none begins here."""
    if text[position : position + 1] == "`":
        end = text.find("`", position + 1)
        return len(text) if end < 0 else end + 1
    if text[position : position + 1] != "$":
        return position
    opening = text[position + 1 : position + 2]
    if opening not in ("{", "("):
        found = _PLAIN.match(text, position + 1)
        return found.end() if found else position + 1
    closing = {"{": "}", "(": ")"}[opening]
    depth, here = 0, position + 1
    while here < len(text):
        depth += (text[here] == opening) - (text[here] == closing)
        here += 1
        if depth == 0:
            break
    return here


def _is_like(text: str, written: str, pattern: str, wanted: bool) -> bool | None:
    """Whether ``[[`` finds a text like a pattern; None: part of it is quoted.

    Args:
        written: the pattern with its quotes.
        pattern: without them.
        wanted: the operator asks for a match.
    """
    if any(character in written for character in "\"'\\"):
        is_all_quoted = re.fullmatch(r"\"[^\"]*\"|'[^']*'", written)
        return (text == pattern) == wanted if is_all_quoted else None
    return fnmatch.fnmatchcase(text, pattern.replace("[^", "[!")) == wanted


def _with_dollars(arithmetic: str) -> str:
    """Names in arithmetic are variables without a ``$``."""
    return re.sub(r"(?<![\w${])([A-Za-z_]\w*)", r"${\1}", arithmetic)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _calculated(text: str) -> int | None:
    """Arithmetic of whole numbers; None: it is something else."""
    try:
        return _number(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError(ast.dump(node))
