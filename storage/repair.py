"""Makes second copies again: where ``replicas`` is 2 and a node is lost, or comes back empty, what was there once more is copied from here.

When the members have changed and that has settled, the node goes through all that it has and asks the homes who else has it. What nobody
else has goes to the node that placement names, in small batches, at a limited rate, and each object once: what the target evicts, or
refuses, is not made again before the members change. A pure step; the thread around it only calls it, and no request ever waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import xxhash

from hicache_ray.errors import ConfigError, StoreError
from hicache_ray.storage import bits
from hicache_ray.storage.copying import as_array
from hicache_ray.storage.ids import ID_BYTES
from hicache_ray.storage.local import LocalStore
from hicache_ray.storage.members import Member, View
from hicache_ray.storage.sharded import ShardedStore
from hicache_ray.storage.sharded_repair import Remaking
from hicache_ray.store import Bytes, Store

log = logging.getLogger("hicache_ray.storage")
_JOIN_S = 5.0
_BURST_S = 1.0
_APART_S = 1.0
_SELDOM = 16  # times again_s
_MADE = 1024  # batches that may still turn out to be of what was dropped


@dataclass(frozen=True)
class RepairConfig:
    """``bytes_per_s``: what a node sends for this, 0: it does nothing. A batch is ``batch`` objects at most, and ends with the first that
    brings it to ``batch_bytes``. ``queue``: objects that wait, at most; ``ask``: ids per question to the homes.

    ``timeout_s``: most that a batch may take, ``scan_s``: to read what the node has. ``step_s``: pause where there is nothing to do,
    ``again_s``: before what failed is tried again; twice as long after each time, up to 16 times, until the members change. ``quiet_s``:
    longer than any drop or clear takes; what was dropped so shortly ago and is here again is left alone for now. ``caught_s``: by then the
    node has heard of a drop that it had missed when it made a copy; later, where it could not ask everybody.
    """

    bytes_per_s: int = 64 << 20
    batch: int = 64
    batch_bytes: int = 8 << 20
    queue: int = 4096
    ask: int = 1024
    timeout_s: float = 10.0
    scan_s: float = 30.0
    step_s: float = 0.25
    again_s: float = 30.0
    quiet_s: float = 60.0
    caught_s: float = 15.0

    def __post_init__(self) -> None:
        if self.bytes_per_s < 0:
            raise ConfigError(f"the rate of repairs must be a number of bytes per second, or 0 for none, not {self.bytes_per_s}")
        sizes, times = (self.batch, self.batch_bytes, self.queue, self.ask), (self.timeout_s, self.scan_s, self.step_s, self.again_s)
        if min(sizes) < 1 or min(times) <= 0 or min(self.quiet_s, self.caught_s) < 0:
            raise ConfigError("the sizes and times of repairs must be positive")


@dataclass
class RepairStats:
    """Counters since the start. ``repaired``: objects that were given a second copy again, of ``repaired_bytes``. ``repair_dropped``: those
    that were given up, as the target refused them, or they were gone or dropped meanwhile, and those whose copy was taken back, as they had
    been dropped before. ``failures``: of steps and calls; they are tried again."""

    repaired: int = 0
    repaired_bytes: int = 0
    repair_dropped: int = 0
    failures: int = 0


class Pace:
    """At most ``rate`` bytes per second, and one second's worth at once. What was spent is waited for afterwards."""

    def __init__(self, rate: int, clock: Callable[[], float]) -> None:
        self._rate, self._clock = rate, clock
        self._free_at = -_BURST_S  # when all that was spent has passed

    def wait(self) -> float:
        """Seconds until more may be spent."""
        return max(self._free_at - self._clock(), 0.0)

    def spend(self, size: int) -> None:
        self._free_at = max(self._free_at, self._clock() - _BURST_S) + size / self._rate


def read_from(store: LocalStore, disk: Store | None) -> Callable[[bytes, float], Bytes | None]:
    """Reads one object of a node, verified, from its arena or else its disk, and brings nothing into the arena for it."""

    def read(id: bytes, timeout_s: float) -> Bytes | None:
        with store.lease([id], 0.0) as lent:
            view = lent.arrays[0]
            copy = None if view is None else view.copy()
            if copy is not None and lent.verify([0], [xxhash.xxh3_64_intdigest(copy.data)]):
                return copy
        if disk is None:
            return None
        with disk.lease([id], timeout_s) as copies:
            return copies.views[0]

    return read


@dataclass
class Repairer:
    """For the node whose store is ``store``, which ``read(id, timeout_s)`` reads. ``client``: the store of all nodes, its own to close.
    ``view``: the members as the node sees them. ``ready``: has the node said what it has? ``told(ids, seconds)``, ``caught(ids, seconds)``:
    which of them it was told to forget of late, or has caught up with; ``heard_at()``: with all from before then it has. ``step`` may be
    called from one thread."""

    client: ShardedStore
    store: Store
    read: Callable[[bytes, float], Bytes | None]
    view: Callable[[], View]
    ready: Callable[[], bool]
    told: Callable[[Sequence[bytes], float], int]
    caught: Callable[[Sequence[bytes], float], int]
    heard_at: Callable[[], float]
    config: RepairConfig = field(default_factory=RepairConfig)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.stats = RepairStats()
        self._on = self.config.bytes_per_s > 0 and self.client.config.replicas == 2
        self._pace = Pace(max(self.config.bytes_per_s, 1), self.clock)
        self._most = min(self.config.batch_bytes, max(self.config.bytes_per_s, 1))
        self._version = -1  # of the members that this is about
        self._ids: bytes | None = None  # all that the node had, one after the other; None: that is still to be asked
        self._place = 0
        self._over = False  # is that dealt with?
        self._begin_at = float("-inf")
        self._again = False
        self._again_s = self.config.again_s
        self._queue: deque[bytes] = deque()
        self._made: deque[tuple[float, float, Member, list[bytes]]] = deque()  # (begun, done, where, what): a drop may have been missed
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """Objects of which it is known that they need a copy."""
        return len(self._queue)

    def idle(self) -> bool:
        """Has all that the node had been looked at, for the members of now?"""
        return not self._on or (self._over and self.view().version == self._version)

    def step(self) -> float:
        """One batch, or one question. Returns in how many seconds there is more to do. Raises StoreError where the node itself fails."""
        if not self._on:
            return self.config.step_s
        self.client.settle_up(self.config.timeout_s)
        self._look_back()
        view = self.view()
        if view.version != self._version:
            self._version, self._again_s = view.version, self.config.again_s
            self._start_over(self.clock())
        if self._over or view.before or len(view.alive) < 2 or self.clock() < self._begin_at or not self.ready():
            return self.config.step_s
        if self._ids is None:
            self._ids, self._place, self._again = b"".join(self.store.scan(b"", self.config.scan_s)), 0, False
        if len(self._queue) < self.config.batch and self._place < len(self._ids):
            began = self.clock()
            self._ask()
            return min(self.clock() - began, 1.0)  # the homes have other work too
        elif self._queue:
            wait = self._pace.wait() if len(self._made) < _MADE else self.config.step_s
            if wait > 0:
                return min(wait, 1.0)
            self._copy([self._queue.popleft() for _ in range(min(self.config.batch, len(self._queue)))])
        elif self._again:
            self._start_over(self.clock() + self._again_s)
            self._again_s = min(2 * self._again_s, _SELDOM * self.config.again_s)
        else:
            self._over, self._ids = True, None
        return 0.0

    def start(self) -> Repairer:
        if self._on:
            self._thread = threading.Thread(target=self._run, name="hicache-repairer", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """A call that is under way ends with its connection; one that connects, by its own deadline. Idempotent."""
        self._stopping.set()
        self.client.close()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = self.config.step_s
        while not self._stopping.wait(pause):
            try:
                pause = self.step()
            except Exception as error:  # whatever it was: without this thread no copy would be made again
                pause = self.config.step_s
                if self._stopping.is_set():
                    return
                self.stats.failures += 1
                if not isinstance(error, StoreError):
                    log.exception("a step of the repairs failed; the next one goes on")

    def _start_over(self, begin_at: float) -> None:
        self._ids, self._over, self._begin_at = None, False, begin_at
        self._queue.clear()

    def _ask(self) -> None:
        assert self._ids is not None
        room = min(self.config.ask, max(self.config.queue - len(self._queue), 1))
        raw = self._ids[self._place : self._place + room * ID_BYTES]
        self._place += len(raw)
        ids = [raw[i : i + ID_BYTES] for i in range(0, len(raw), ID_BYTES)]
        found = self.client.lacking(ids, self.config.timeout_s)
        self._queue.extend(ids[i] for i in bits.each(found.alone))
        if found.unsure:
            self.stats.failures += 1
            self._again = True

    def _copy(self, ids: Sequence[bytes]) -> None:
        began = self.clock()
        fenced = self.told(ids, self.config.quiet_s)
        self._again |= bool(fenced)
        ids = [id for i, id in enumerate(ids) if not fenced >> i & 1]
        ids = self._still_alone(ids)
        sizes, unread = dict[bytes, int](), list[bytes]()

        def read(id: bytes) -> Bytes | None:
            if sum(sizes.values()) >= self._most or self._stopping.is_set():
                unread.append(id)
                return None
            try:
                found = self.read(id, self.config.timeout_s)
            except StoreError:
                found = None
            if found is not None:
                sizes[id] = as_array(found).nbytes
            return found

        try:
            made = self.client.remake(ids, read, self.config.timeout_s) if ids else None
        except StoreError:
            self._again = True
            raise
        self._queue.extendleft(reversed(unread))
        if made is not None:
            self._pace.spend(sum(sizes.values()))
            self._count(made, set(ids) - set(unread), sizes, began)

    def _still_alone(self, ids: Sequence[bytes]) -> list[bytes]:
        """The queue is minutes long at worst: whoever came back with a disk may have said meanwhile what it has."""
        found = self.client.lacking(ids, self.config.timeout_s)
        self._again |= bool(found.unsure)
        return [ids[i] for i in bits.each(found.alone)]

    def _count(self, made: Remaking, tried: set[bytes], sizes: dict[bytes, int], began: float) -> None:
        """What was made, and is to stay: not what a drop has come across."""
        fenced = self.told(made.ids, self.clock() - began + _APART_S)
        there = set[bytes]()
        for member, held in made.stored.items():
            if held & fenced:
                self.client.take_back(member, [made.ids[i] for i in bits.each(held & fenced)], self.config.timeout_s)
            stays = [made.ids[i] for i in bits.each(held & ~fenced)]
            there.update(stays)
            if stays:
                self._made.append((began, self.clock(), member, stays))
        self.stats.repaired += len(there)
        self.stats.repaired_bytes += sum(sizes[id] for id in there)
        failed = {id for id in tried - there if id in sizes} if made.errors else set()
        self._again |= bool(failed)
        self.stats.failures += bool(failed)
        self.stats.repair_dropped += len(tried - there - failed)

    def _look_back(self) -> None:
        """What this node has missed the drop of, and has caught up with since, must not be where it put it meanwhile."""
        while self._made and self._made[0][0] + self.config.caught_s <= self.clock() and self._made[0][1] < self.heard_at():
            began, _, member, ids = self._made.popleft()
            caught = self.caught(ids, self.clock() - began + _APART_S)
            if caught:
                gone = [ids[i] for i in bits.each(caught)]
                self.stats.repair_dropped += len(gone)
                self.client.take_back(member, gone, self.config.timeout_s)
