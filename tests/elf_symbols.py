"""Symbols of shared libraries (ELF, 64 bits, little-endian): what each offers to others, and wants of them."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("rest", "<u8", 2)])
_DYNAMIC_SYMBOLS, _WEAK = 11, 2


@dataclass(frozen=True)
class Symbols:
    """Args:
    offered: names that a library defines for others.
    wanted: names that another one has to define.
    """

    offered: frozenset[str]
    wanted: frozenset[str]


def symbols_of(library: bytes) -> Symbols:
    """Raises: ValueError: it is no such library."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no ELF library of 64 bits")
    (begin,) = struct.unpack_from("<Q", library, 40)
    size, count = struct.unpack_from("<HH", library, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", library, begin + number * size) for number in range(count)]
    offered: set[str] = set()
    wanted: set[str] = set()
    for _, kind, _, _, offset, nbytes, link, *_ in sections:
        if kind != _DYNAMIC_SYMBOLS:
            continue
        names = library[sections[link][4] :][: sections[link][5]]
        for symbol in np.frombuffer(library, _SYMBOL, nbytes // _SYMBOL.itemsize, offset)[1:]:
            name = names[symbol["name"] : names.index(b"\0", symbol["name"])].decode()
            if symbol["section"]:
                offered.add(name)
            elif symbol["info"] >> 4 != _WEAK:
                wanted.add(name)
    return Symbols(frozenset(offered), frozenset(wanted))


def lacking(wants: Symbols, others: Iterable[Symbols], prefixes: tuple[str, ...]) -> list[str]:
    """Names with one of these prefixes that a library wants, and neither it nor any other one offers."""
    offered = frozenset().union(wants.offered, *(other.offered for other in others))
    return sorted(name for name in wants.wanted - offered if name.startswith(prefixes))
