"""Rules about leases: what is lent is not reused, a lease ends, and who reads for too long is told."""

from __future__ import annotations

from hicache_ray.storage.conformance_kit import (
    EVERYTHING,
    PAGE,
    ROOM,
    TIMEOUT_S,
    Rules,
    get,
    name,
    page,
    present,
    put,
    require,
    same,
)
from hicache_ray.store import Bytes

WITHOUT_CLOCK = "no clock is given on which the leases of this store run out"
WITHOUT_LOANS = "what this store lends are copies"


class LeaseRules(Rules):
    def test_a_lease_lends_the_bytes(self) -> None:
        with self.store() as store:
            put(store, [1, 2])
            with store.lease([name(1), name(9), name(2)], TIMEOUT_S) as lent:
                same([contents(view) for view in lent.views], [page(1).tobytes(), None, page(2).tobytes()], "views")
                same(lent.valid(), 0b101, "valid")
                require(all(memoryview(view).readonly for view in lent.views if view is not None), "a view can be written to")
                if self.abilities.lends:
                    same(store.stats(TIMEOUT_S).leases, 1, "leases")
            same(lent.valid(), 0, "valid after the release")
            lent.release()
            same(store.stats(TIMEOUT_S).leases, 0, "leases after a second release")

    def test_leases_of_any_size(self) -> None:
        with self.store() as store:
            for size in (0, 1, 63, PAGE - 1, 300_000):
                put(store, [1], size)
                with store.lease([name(1), name(1)], TIMEOUT_S) as lent:
                    same([contents(view) for view in lent.views], 2 * [page(1, size).tobytes()], f"views of {size} bytes")
                    same(lent.valid(), 0b11, f"valid, of {size} bytes")
                store.drop([name(1)], TIMEOUT_S)

    def test_a_lease_is_a_use(self) -> None:
        self.needs_lru()
        with self.store() as store:
            for n in range(ROOM):
                put(store, [n])
            store.lease([name(0)], TIMEOUT_S).release()
            put(store, [100])
            same(present(store, [0, 1, 100]), {0, 100}, "what stays")

    def test_leased_bytes_are_not_reused(self) -> None:
        self.needs(self.abilities.lends, WITHOUT_LOANS)
        self.needs_lru()
        taken = self.taken(PAGE)
        with self.store() as store:
            put(store, range(ROOM))
            with store.lease([name(n) for n in range(ROOM - 2)], TIMEOUT_S) as lent:
                same(put(store, range(100, 110)).bit_count(), 2, "objects stored where two are not leased")
                same(store.drop([name(0)], TIMEOUT_S), 1, "a drop of a leased object")
                same(present(store, [0]), set(), "a lookup of it")
                same(put(store, [200]), 1, "a put that can only evict one of the two")
                same(lent.valid(), EVERYTHING >> 2, "valid")
                read = [contents(view) for view in lent.views]
                same(read, [page(n).tobytes() for n in range(ROOM - 2)], "views while others are stored")
                same(store.stats(TIMEOUT_S).used_bytes, ROOM * taken, "bytes in use, those lent included")
            same(store.stats(TIMEOUT_S).used_bytes, (ROOM - 1) * taken, "bytes in use after the release")
            same(put(store, range(300, 310)).bit_count(), 10, "objects stored after the release")

    def test_a_lease_outlives_a_drop_and_a_clear(self) -> None:
        self.needs(self.abilities.lends, WITHOUT_LOANS)
        with self.store() as store:
            put(store, [1, 2])
            with store.lease([name(1), name(2)], TIMEOUT_S) as lent:
                store.drop([name(1)], TIMEOUT_S)
                same(store.clear(TIMEOUT_S), 1, "objects cleared")
                visible = put(store, range(10, 10 + ROOM)).bit_count()
                if self.abilities.exact_room:
                    same(visible, ROOM - 2, "objects stored beside what is leased")
                same([contents(view) for view in lent.views], [page(n).tobytes() for n in (1, 2)], "views")
                same(lent.valid(), 0b11, "valid")
            same(get(store, [1, 2]), set(), "a get of what was dropped and cleared")

    def test_a_lease_runs_out(self) -> None:
        """By the reader's own clock, whether or not the bytes were given to another object meanwhile."""
        clock = self.abilities.clock
        self.needs(clock and self.abilities.lends, WITHOUT_CLOCK)
        assert clock is not None
        with self.store() as store:
            put(store, [1])
            with store.lease([name(1)], TIMEOUT_S) as lent:
                clock.advance(0.9 * self.abilities.lease_s)
                same(lent.valid(), 1, "valid before the lease runs out")
                clock.advance(0.1 * self.abilities.lease_s)
                same(lent.valid(), 0, "valid when the lease has run out")
            same(get(store, [1]), {1}, "a get afterwards")

    def test_a_dead_reader_does_not_pin_for_ever(self) -> None:
        clock = self.abilities.clock
        self.needs(clock and self.abilities.lends and self.abilities.exact_room, WITHOUT_CLOCK)
        assert clock is not None
        with self.store() as store:
            put(store, range(ROOM))
            lent = store.lease([name(n) for n in range(ROOM)], TIMEOUT_S)
            same(put(store, [100]), 0, "a put while everything is leased")
            clock.advance(self.abilities.lease_s)
            same(put(store, [100]), 1, "a put when the lease has run out")
            same((lent.valid(), store.stats(TIMEOUT_S).leases), (0, 0), "valid, and leases")
            lent.release()
            same(get(store, [100]), {100}, "a get after a release that came too late")

    def test_a_get_longer_than_its_lease_is_a_miss(self) -> None:
        clock = self.abilities.clock
        self.needs(clock and self.abilities.gets_by_lease, "a get of this store does not depend on a lease")
        assert clock is not None
        with self.store() as store:
            put(store, range(20))
            targets = [bytearray(PAGE) for _ in range(20)]
            clock.step = self.abilities.lease_s / 10
            try:
                found = store.get([name(n) for n in range(20)], targets, 1e6)
            finally:
                clock.step = 0.0
            same(found, 0, "a get that took longer than the lease")
            same(get(store, range(20)), set(range(20)), "a get in time afterwards")

    def test_views_outlive_the_handle(self) -> None:
        """Reading what was lent by a handle that is closed now gives bytes, and not a crash; so does letting go of it."""
        with self.store() as store:
            put(store, [1])
            lent = store.lease([name(1)], TIMEOUT_S)
            store.close()
            same(contents(lent.views[0]), page(1).tobytes(), "a view after the close")
            lent.release()
            same(lent.valid(), 0, "valid after the release")


def contents(view: Bytes | None) -> bytes | None:
    return None if view is None else bytes(memoryview(view))
