"""Bytes by tenant. An id begins with its space; a space belongs to a tenant, which its namespace's record names.

A space that nobody described belongs to the tenant "" (number 0).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import StoreError
from hicache_ray.store import SPACE_BYTES

TENANT = "tenant"  # the field of a namespace's record that says whose it is
MOST = 1 << 15  # tenants: their numbers have 16 bits in the table of objects


@dataclass
class Usage:
    """``bytes``: of everything that occupies a slot; ``objects``: visible ones; ``refused``: over the cap; ``cap`` 0: none."""

    bytes: int = 0
    objects: int = 0
    refused: int = 0
    evictions: int = 0
    cap: int = 0


class Tenants:
    """``caps``: most bytes of a tenant, all its spaces together."""

    def __init__(self, caps: Mapping[str, int] | None = None) -> None:
        self.caps = dict(caps or {})
        self.usage: list[Usage] = []
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []  # numbers of tenants that are forgotten
        self._spaces: dict[int, int] = {}
        self.number("")

    def number(self, name: str) -> int:
        """Of a tenant; counted from its first mention. Raises StoreError where there are too many."""
        found = self._numbers.get(name)
        if found is not None:
            return found
        if not self._free and len(self.usage) == MOST:
            raise StoreError(f"the store counts for {MOST} tenants already; {name!r} would be one too many")
        usage = Usage(cap=self.caps.get(name, 0))
        if self._free:
            number = self._free.pop()
            self.usage[number] = usage
        else:
            number = len(self.usage)
            self.usage.append(usage)
        self._numbers[name] = number
        return number

    def forget(self, number: int) -> None:
        """A tenant that has no space, no byte and no cap any more; its number may be another's. Without effect where it has one."""
        usage = self.usage[number]
        if not number or usage.bytes or usage.cap or number in self._spaces.values():
            return
        self._numbers = {name: other for name, other in self._numbers.items() if other != number}
        self._free.append(number)

    def assign(self, space: bytes, name: str) -> tuple[int, int]:
        """The space belongs to this tenant from now on: (number of the one it belonged to, the tenant's number). What it holds already is
        the caller's to move. Raises StoreError."""
        number, word = self.number(name), _word(space)
        before = self._spaces.get(word, 0)
        self._spaces[word] = number
        return before, number

    def of(self, ids: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """(n,) numbers of the tenants of (n, width) ids."""
        spaces = np.ascontiguousarray(ids[:, :SPACE_BYTES]).view(np.uint64)[:, 0]
        if not self._spaces:
            return np.zeros(len(spaces), np.int64)
        if not len(spaces) or (spaces == spaces[0]).all():
            number = self._spaces.get(int(spaces[0]), 0) if len(spaces) else 0
            return np.full(len(spaces), number, np.int64)
        kinds, inverse = np.unique(spaces, return_inverse=True)
        return np.array([self._spaces.get(space, 0) for space in kinds.tolist()], np.int64)[inverse]

    def of_one(self, id: bytes) -> int:
        """:meth:`of` of one."""
        return self._spaces.get(_word(id), 0) if self._spaces else 0

    def count(self, tenants: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], sign: int) -> None:
        """Add (+1) or take away (-1) the bytes of objects."""
        for number, part in grouped(tenants):
            self.usage[number].bytes += sign * int(lengths[part].sum())

    def count_objects(self, tenants: npt.NDArray[np.int64], sign: int) -> None:
        for number, part in grouped(tenants):
            self.usage[number].objects += sign * (len(tenants) if part is Ellipsis else len(part))

    def report(self) -> dict[str, dict[str, int]]:
        """Usage by name; empty where nobody named a tenant."""
        if not self.caps and len(self._numbers) == 1:
            return {}
        return {name: asdict(self.usage[number]) for name, number in self._numbers.items()}


def grouped(numbers: npt.NDArray[np.int64]) -> list[tuple[int, Any]]:
    """(number, where it stands) for each number, in order of the first place; ``...`` where it stands everywhere."""
    if not len(numbers):
        return []
    first = int(numbers[0])
    if len(numbers) == 1 or (numbers == first).all():
        return [(first, ...)]
    return [(number, np.flatnonzero(numbers == number)) for number in dict.fromkeys(numbers.tolist())]


def _word(space: bytes) -> int:
    return int.from_bytes(space[:SPACE_BYTES].ljust(SPACE_BYTES, b"\0"), sys.byteorder)
