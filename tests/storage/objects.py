"""Ids and pages for the tests of stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hicache_ray.storage import bits
from hicache_ray.store import KEY_BYTES, TAG_BYTES, Store

PAGE = 16 << 10
TIMEOUT_S = 10.0
TAG = b"t" * TAG_BYTES
Page = npt.NDArray[np.uint8]


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def name(number: int) -> bytes:
    return key(number) + TAG


def page(number: int, size: int = PAGE) -> Page:
    """Bytes that no other page has."""
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def put(store: Store, numbers: Sequence[int], size: int = PAGE) -> int:
    return store.put([name(n) for n in numbers], [page(n, size).data for n in numbers], TIMEOUT_S)


def get(store: Store, numbers: Sequence[int], size: int = PAGE) -> set[int]:
    """Read, and compare what was verified with what was put. Returns the numbers that hit."""
    targets = [np.zeros(size, np.uint8) for _ in numbers]
    hit = store.get([name(n) for n in numbers], [target.data for target in targets], TIMEOUT_S)
    for i in bits.each(hit):
        assert (targets[i] == page(numbers[i], size)).all()
    return {numbers[i] for i in bits.each(hit)}


def present(store: Store, numbers: Sequence[int]) -> set[int]:
    """Numbers that a lookup finds. Touches nothing."""
    answer = store.lookup([key(n) for n in numbers], [TAG], TIMEOUT_S)[TAG]
    return {numbers[i] for i in bits.each(answer.hit)}


#: One call of every operation.
CALLS: Mapping[str, Callable[[Store], object]] = {
    "put": lambda s: put(s, [1]),
    "get": lambda s: get(s, [1]),
    "lease": lambda s: s.lease([name(1)], TIMEOUT_S).release(),
    "lookup": lambda s: present(s, [1]),
    "drop": lambda s: s.drop([name(1)], TIMEOUT_S),
    "clear": lambda s: s.clear(TIMEOUT_S),
    "scan": lambda s: list(s.scan(timeout_s=TIMEOUT_S)),
    "describe": lambda s: s.describe(b"1", {}, TIMEOUT_S),
    "described": lambda s: s.described(TIMEOUT_S),
    "stats": lambda s: s.stats(TIMEOUT_S),
}
