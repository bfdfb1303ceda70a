"""Draws gain.svg: the step times of README's table, which `eplb-runtime bench train` has printed.

python launch/images/gain.py
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROW = re.compile(r"^\| (.+) \(`(\w+)`\) \| (\d+) ms \| ([\d.]+) \|$", re.MULTILINE)
LEFT, LONGEST, BAR, LINE = 250, 400, 22, 36
STYLE = """
text{font:14px system-ui,sans-serif;fill:#24292f}.note{fill:#57606a}.static{fill:#c4361d}.homes,.replicas{fill:#0a64ba}
.even{fill:#8c959f}@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}.static{fill:#e5654b}
.homes,.replicas{fill:#58a6ff}.even{fill:#6e7681}}"""


def drawn(readme: str) -> str:
    """Return the picture of the rows of the table; transparent, for light and dark pages."""
    rows = [(name, key, int(ms), imbalance) for name, key, ms, imbalance in ROW.findall(readme)]
    fixed = rows[0][2]
    parts = []
    for number, (name, key, ms, imbalance) in enumerate(rows):
        top, width = 34 + number * LINE, LONGEST * ms // fixed
        saved = "" if ms == fixed else f", {1 - ms / fixed:.0%} less"
        parts += [
            f'<text x="{LEFT - 12}" y="{top + 16}" text-anchor="end">{name}</text>',
            f'<rect class="{key}" x="{LEFT}" y="{top}" width="{width}" height="{BAR}" rx="3"/>',
            f'<text x="{LEFT + width + 10}" y="{top + 16}">{ms} ms{saved}</text>',
            f'<text class="note" x="840" y="{top + 16}" text-anchor="middle">{imbalance}</text>',
        ]
    head = f'<text class="note" x="{LEFT}" y="20">time of a step</text>'
    head += '<text class="note" x="840" y="20" text-anchor="middle">imbalance</text>'
    size = f'width="900" height="{40 + len(rows) * LINE}"'
    body = "\n".join([f"<style>{STYLE}</style>", head, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<title>Time of a step</title>\n{body}\n</svg>\n'


if __name__ == "__main__":
    (HERE / "gain.svg").write_text(drawn((HERE.parents[1] / "README.md").read_text()))
