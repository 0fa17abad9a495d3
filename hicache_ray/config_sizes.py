"""Byte sizes as people write them: ``2GiB``, ``512 MB``, ``1.5Gi``, ``4096``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

SIZE_HELP = "write bytes, or a number with a unit, such as 512MB (10^6) or 2GiB (2^30)"

_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]i?B|[KMGT]i|B)?\s*", re.ASCII | re.IGNORECASE)
_POWERS: Mapping[str, int] = MappingProxyType({letter: i for i, letter in enumerate("KMGT", start=1)})


def parse_size(value: object) -> int:
    """Bytes. A unit with an ``i`` is a power of 1024, one without a power of 1000; a bare letter (``2G``) is refused, since systems
    disagree about it. Raises ValueError with a sentence's second half (``it must ...``)."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        size = _bytes_of(match["number"], (match["unit"] or "B").upper())
    else:
        raise ValueError(SIZE_HELP)
    if size <= 0:
        raise ValueError("it must be more than 0 bytes")
    return size


def parse_size_or_0(value: object) -> int:
    """The same, where 0 says that there is to be nothing."""
    if value in ("0", 0) and not isinstance(value, bool):
        return 0
    return parse_size(value)


def format_size(size: int) -> str:
    """The shortest exact way to write ``size``: ``2GiB``, ``500MB``, ``1234``. ``parse_size`` reads it back unchanged."""
    for base, suffix in ((1024, "iB"), (1000, "B")) if size else ():
        for letter, power in reversed(tuple(_POWERS.items())):
            if size % base**power == 0:
                return f"{size // base**power}{letter}{suffix}"
    return str(size)


def _bytes_of(number: str, unit: str) -> int:
    factor = 1 if unit == "B" else (1024 if "I" in unit else 1000) ** _POWERS[unit[0]]
    whole, _, fraction = number.partition(".")
    return int(whole) * factor + (int(fraction) * factor // 10 ** len(fraction) if fraction else 0)
