"""What the rules of the conformance suite are made of: pages, calls with their contents compared, and what a store is able to do.

No test framework is needed: a broken rule raises :class:`Broken`, an AssertionError; a rule that does not apply raises
:class:`unittest.SkipTest`, which test frameworks understand.
"""

from __future__ import annotations

import enum
import threading
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import StoreError
from hicache_ray.storage import bits
from hicache_ray.store import DIGEST_BYTES, GROUP_BYTES, SPACE_BYTES, TAG_BYTES, Store, StoreStats

PAGE = 16 << 10  # bytes of an object, where a rule does not say otherwise
ROOM = 64  # objects that fit
TIMEOUT_S = 10.0
TAG = b"t" * TAG_BYTES
EVERYTHING = (1 << ROOM) - 1
Page = npt.NDArray[np.uint8]


class Broken(AssertionError):
    """A store does not keep a rule; the message says how it shows."""


class Clock:
    """Seconds that pass when somebody says so, or ``step`` of them with every look: the time that a slow copy takes."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now, self.step = now, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Gate:
    """Stops whoever comes by, until it is opened."""

    def __init__(self) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()

    def stop(self) -> None:
        """For the one who comes by."""
        self.reached.set()
        self._opened.wait(TIMEOUT_S)

    def open(self) -> None:
        self._opened.set()


class Eviction(enum.Enum):
    """Which object goes when room is needed: the least recently used (EXACT), roughly that (APPROXIMATE), or nothing (NEVER)."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    NEVER = "never"


@dataclass(frozen=True)
class Abilities:
    """What a store can do, so that one that cannot is asked less, and says so.

    ``eviction``: see :class:`Eviction`. ``exact_room``: what it is given room for fits, and ``used_bytes`` is the sum of the lengths;
    ``overhead_bytes`` of its own per object included. ``counts``: the counters of ``stats`` are exact. ``lends``: leased bytes are the
    stored ones, and stay unused by others until then. ``clock``: the one on which its leases of ``lease_s`` seconds run out.
    ``gets_by_lease``: so does the time that a get may take. ``hold``: within ``hold(store, gate)``, a put stops at the gate when its
    objects are reserved and before they are visible. ``describes``: records are kept. ``damages``: it has ``damage(id)``, which flips
    one stored bit and leaves the checksum.
    """

    eviction: Eviction = Eviction.EXACT
    exact_room: bool = True
    overhead_bytes: int = 0
    counts: bool = True
    lends: bool = True
    clock: Clock | None = None
    lease_s: float = 10.0
    gets_by_lease: bool = False
    hold: Callable[[Store, Gate], AbstractContextManager[None]] | None = None
    describes: bool = True
    damages: bool = True


class Rules:
    """Base of the rules: a subclass says how a store is made and what it can do. Every rule gets a store that holds nothing."""

    abilities: Abilities = Abilities()

    def make_store(self, capacity_bytes: int) -> AbstractContextManager[Store]:
        """A store that is empty (or has been emptied) and holds ``capacity_bytes``; closed when the context ends."""
        raise NotImplementedError("say how a store is made: def make_store(self, capacity_bytes)")

    @contextmanager
    def store(self) -> Iterator[Store]:
        """One store for one rule. A store with a ``check()`` is checked at the end."""
        with self.make_store(ROOM * self.taken(PAGE)) as store:
            yield store
            check: Callable[[], None] | None = getattr(store, "check", None)
            if check is not None:
                check()

    def taken(self, size: int) -> int:
        """Bytes that an object of ``size`` bytes takes."""
        return size + self.abilities.overhead_bytes

    def needs(self, able: object, sentence: str) -> None:
        """Leave the rule where the store is not ``able``; the sentence says why."""
        if not able:
            raise unittest.SkipTest(sentence)

    def needs_lru(self) -> None:
        exact = self.abilities.eviction is Eviction.EXACT and self.abilities.exact_room
        self.needs(exact, "the order in which this store evicts, or its room, is not exact")


# -- objects ---------------------------------------------------------------------------------------------------------------------------


def key(number: int, space: int = 0) -> bytes:
    """Numbers from ``256 ** DIGEST_BYTES`` on are in other groups."""
    return bytes([space]) * SPACE_BYTES + number.to_bytes(GROUP_BYTES + DIGEST_BYTES, "big")


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
        require((targets[i] == page(numbers[i], size)).all(), f"a get of {size} bytes said hit and gave other bytes than were put")
    return {numbers[i] for i in bits.each(hit)}


def present(store: Store, numbers: Sequence[int]) -> set[int]:
    """Numbers that a lookup finds. Touches nothing."""
    answer = store.lookup([key(n) for n in numbers], [TAG], TIMEOUT_S)[TAG]
    require(not (answer.hit & answer.pending or (answer.hit | answer.pending) & answer.retry), "the bitsets of an answer overlap")
    return {numbers[i] for i in bits.each(answer.hit)}


# -- judgements ------------------------------------------------------------------------------------------------------------------------


def require(condition: object, sentence: str) -> None:
    """Raises Broken."""
    if not condition:
        raise Broken(sentence)


def same(found: object, wanted: object, what: str) -> None:
    """Raises Broken."""
    if found != wanted:
        raise Broken(f"{what}: {found!r}, where {wanted!r} is right")


def refused(call: Callable[[], object], what: str, *errors: type[Exception], says: str = "") -> None:
    """The call raises a StoreError (or one of ``errors``) whose text contains ``says``. Raises Broken."""
    right = errors or (StoreError,)
    try:
        call()
    except right as error:
        require(says in str(error), f"{what} is refused with {str(error)!r}, which does not say {says!r}")
        return
    raise Broken(f"{what} is not refused")


class Since:
    """What the counters of a store have counted since now: a store may have lived before."""

    def __init__(self, store: Store) -> None:
        self._store, self._start = store, store.stats(TIMEOUT_S)

    def __call__(self, counter: str) -> int:
        found: int = getattr(self.now(), counter) - getattr(self._start, counter)
        return found

    def now(self) -> StoreStats:
        return self._store.stats(TIMEOUT_S)


class Worker:
    """A thread whose end is waited for, and whose error is the rule's."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self.result: object = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="conformance", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error

    def ends_within(self, seconds: float) -> bool:
        """Does the work end by itself?"""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def join(self) -> object:
        """Result of the work. Raises what it raised, and Broken where it does not end."""
        require(self.ends_within(4 * TIMEOUT_S), f"calls with a timeout of {TIMEOUT_S:g} s do not end within {4 * TIMEOUT_S:g} s")
        if self.error is not None:
            raise self.error
        return self.result
