"""Rules about calls at the same time: nothing half-done is visible, a clear is a fence, and threads do not harm each other."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hicache_ray.storage import bits
from hicache_ray.storage.conformance_kit import (
    PAGE,
    ROOM,
    TAG,
    TIMEOUT_S,
    Gate,
    Rules,
    Worker,
    get,
    key,
    name,
    page,
    present,
    put,
    require,
    same,
)
from hicache_ray.store import KEY_BYTES, SPACE_BYTES, Store

THREADS, CALLS = 4, 50
WAITS_S = 0.5  # after which a second put of the same object is one that waits for the first


class ThreadRules(Rules):
    def test_threads_share_a_handle(self) -> None:
        """Every hit has the right bytes, every call ends, and nothing stays leased."""
        with self.store() as store:
            start = threading.Barrier(THREADS)
            workers = [Worker(lambda seed=seed: self._play(store, start, seed)) for seed in range(THREADS)]  # type: ignore[misc]
            for worker in workers:
                worker.join()
            stats = store.stats(TIMEOUT_S)
            same(stats.leases, 0, "leases at the end")
            require(stats.used_bytes <= stats.capacity_bytes, f"{stats.used_bytes} bytes are used of {stats.capacity_bytes}")
            same(len(list(store.scan(timeout_s=TIMEOUT_S))), stats.objects, "objects that a scan names")
            put(store, [1000])
            same(get(store, [1000]), {1000}, "a get afterwards")

    def _play(self, store: Store, start: threading.Barrier, seed: int) -> None:
        chance = random.Random(seed)
        start.wait(TIMEOUT_S)
        for _ in range(CALLS):
            numbers = chance.sample(range(2 * ROOM), 4)
            act = chance.randrange(10)
            if act < 4:
                put(store, numbers)
            elif act < 7:
                get(store, numbers)
            elif act < 8:
                present(store, numbers)
            elif act < 9:
                store.drop([name(n) for n in numbers[:1]], TIMEOUT_S)
            else:
                with store.lease([name(n) for n in numbers], TIMEOUT_S) as lent:
                    read = [None if view is None else bytes(memoryview(view)) for view in lent.views]
                    for i in bits.each(lent.valid()):
                        require(read[i] == page(numbers[i]).tobytes(), "a valid view has other bytes than were put")

    def test_two_who_put_the_same_both_find_it(self) -> None:
        """The first wins; the other finds it, or is told 0 and finds it later. It is never stored twice."""
        with self.store() as store:
            start = threading.Barrier(THREADS)

            def work() -> int:
                start.wait(TIMEOUT_S)
                return put(store, range(8))

            visible = [worker.join() for worker in [Worker(work) for _ in range(THREADS)]]
            require(any(visible), "of several threads that put the same objects, none was told that they are visible")
            put(store, range(8))
            same(get(store, range(8)), set(range(8)), "a get")
            same(store.stats(TIMEOUT_S).objects, 8, "objects")

    # -- a put that is held before it is visible -------------------------------------------------------------------------------------

    @contextmanager
    def _held(self, store: Store, ids: list[bytes], sources: list[bytes]) -> Iterator[tuple[Gate, Worker]]:
        hold, gate = self.abilities.hold, Gate()
        assert hold is not None
        with hold(store, gate):
            worker = Worker(lambda: store.put(ids, sources, TIMEOUT_S))
            try:
                require(gate.reached.wait(TIMEOUT_S), "a put does not come to the gate")
                yield gate, worker
            finally:
                gate.open()
                worker.join()

    def _needs_hold(self) -> None:
        self.needs(self.abilities.hold, "no way is given to hold a put of this store before its objects are visible")

    def test_nothing_is_visible_before_it_is_complete(self) -> None:
        self._needs_hold()
        with self.store() as store:
            put(store, [5])
            with self._held(store, [name(1), name(2)], [page(1).tobytes(), page(2).tobytes()]) as (gate, worker):
                same(present(store, [1, 2, 5]), {5}, "a lookup while a put is under way")
                same(get(store, [1, 2, 5]), {5}, "a get while a put is under way")
                same(list(store.scan(timeout_s=TIMEOUT_S)), [name(5)], "a scan while a put is under way")
                with store.lease([name(1)], TIMEOUT_S) as lent:
                    same((list(lent.views), lent.valid()), ([None], 0), "a lease while a put is under way")
                gate.open()
                same(worker.join(), 0b11, "the put")
            same(get(store, [1, 2, 5]), {1, 2, 5}, "a get after the put")

    def test_a_put_under_way_is_pending(self) -> None:
        self._needs_hold()
        with self.store() as store:
            put(store, [5])
            with self._held(store, [name(1), name(2)], [page(1).tobytes(), page(2).tobytes()]):
                answer = store.lookup([key(n) for n in (5, 1, 3, 2)], [TAG], TIMEOUT_S)[TAG]
                same((answer.hit, answer.pending, answer.retry), (0b0001, 0b1010, 0), "hit, pending, to be retried")
                used = store.stats(TIMEOUT_S).used_bytes
                require(used >= 3 * PAGE, f"what a put has reserved is not counted: {used} bytes are used")
            answer = store.lookup([key(n) for n in (5, 1, 3, 2)], [TAG], TIMEOUT_S)[TAG]
            same((answer.hit, answer.pending, answer.retry), (0b1011, 0, 0), "hit, pending, to be retried, after the put")

    def test_a_put_under_way_is_put_once(self) -> None:
        """A second put of it is told 0, or waits; the first one's bytes stay."""
        self._needs_hold()
        with self.store() as store:
            with self._held(store, [name(1)], [page(1).tobytes()]) as (gate, _):
                second = Worker(lambda: store.put([name(1)], [page(2).tobytes()], TIMEOUT_S))
                second.ends_within(WAITS_S)
                gate.open()
                second.join()
            same(get(store, [1]), {1}, "a get: the bytes of the first")
            same(store.stats(TIMEOUT_S).objects, 1, "objects")

    def test_a_clear_is_a_fence(self) -> None:
        """Complete when it returns: a put that began before it makes nothing visible afterwards."""
        self._needs_hold()
        with self.store() as store:
            put(store, [5])
            with self._held(store, [name(1), name(2)], [page(1).tobytes(), page(2).tobytes()]) as (gate, worker):
                same(store.clear(TIMEOUT_S), 1, "visible objects cleared")
                gate.open()
                same(worker.join(), 0, "a put that a clear came across")
            same(present(store, [1, 2, 5]), set(), "a lookup after both")
            same(store.stats(TIMEOUT_S).used_bytes, 0, "bytes in use after both")
            same(put(store, [1, 2]), 0b11, "a put after the clear")
            same(get(store, [1, 2]), {1, 2}, "a get after it")

    def test_a_clear_fences_its_prefix_only(self) -> None:
        self._needs_hold()
        mine, other = key(1, 1) + TAG, key(1, 2) + TAG
        with self.store() as store:
            with self._held(store, [mine, other], [page(1).tobytes(), page(2).tobytes()]) as (gate, worker):
                same(store.clear(TIMEOUT_S, mine[:SPACE_BYTES]), 0, "visible objects cleared")
                gate.open()
                same(worker.join(), 0b10, "a put into the namespace that was cleared, and into another")
            same(list(store.scan(timeout_s=TIMEOUT_S)), [other], "a scan after both")

    def test_a_drop_revokes_a_put_under_way(self) -> None:
        self._needs_hold()
        with self.store() as store:
            with self._held(store, [name(1), name(2)], [page(1).tobytes(), page(2).tobytes()]) as (gate, worker):
                same(store.drop([name(1)], TIMEOUT_S), 0, "a drop of what is not visible yet")
                gate.open()
                same(worker.join(), 0b10, "a put of two objects, one dropped meanwhile")
            same(get(store, [1, 2]), {2}, "a get after both")
            same({id[:KEY_BYTES] for id in store.scan(timeout_s=TIMEOUT_S)}, {key(2)}, "a scan after both")
