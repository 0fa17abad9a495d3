"""Rules about room: the cap is a cap, and what goes first when it is reached."""

from __future__ import annotations

from hicache_ray.storage import bits
from hicache_ray.storage.conformance_kit import (
    EVERYTHING,
    PAGE,
    ROOM,
    TIMEOUT_S,
    Eviction,
    Rules,
    Since,
    get,
    name,
    page,
    present,
    put,
    require,
    same,
)


class RoomRules(Rules):
    def test_the_cap_is_a_cap(self) -> None:
        """Whatever is put, what is counted never exceeds what the store said, and what a put called visible is."""
        with self.store() as store:
            for first in range(0, 3 * ROOM, 8):
                numbers = range(first, first + 8)
                visible = put(store, numbers)
                same(present(store, numbers), {first + i for i in bits.each(visible)}, "what a lookup finds of what a put called visible")
                stats = store.stats(TIMEOUT_S)
                require(stats.used_bytes <= stats.capacity_bytes, f"{stats.used_bytes} bytes are used of {stats.capacity_bytes}")
                require(stats.objects * PAGE <= stats.capacity_bytes, f"{stats.objects} objects of {PAGE} bytes exceed the capacity")
                same(len(list(store.scan(timeout_s=TIMEOUT_S))), stats.objects, "objects that a scan names")

    def test_what_it_has_room_for_fits(self) -> None:
        self.needs(self.abilities.exact_room, "the room of this store is not exact")
        with self.store() as store:
            same(store.stats(TIMEOUT_S).capacity_bytes, ROOM * self.taken(PAGE), "capacity in bytes")
            same(put(store, range(ROOM)), EVERYTHING, f"a put of {ROOM} objects")
            same(store.stats(TIMEOUT_S).used_bytes, ROOM * self.taken(PAGE), "bytes in use")
            same(get(store, range(ROOM)), set(range(ROOM)), "a get of all of them")

    def test_the_oldest_goes(self) -> None:
        self.needs_lru()
        with self.store() as store:
            since = Since(store)
            for first in range(0, 3 * ROOM, 8):
                same(put(store, range(first, first + 8)), 0xFF, "a put into a full store")
            same(present(store, range(3 * ROOM)), set(range(2 * ROOM, 3 * ROOM)), "what stays")
            if self.abilities.counts:
                same(since("evictions"), 2 * ROOM, "evictions")

    def test_a_read_and_a_second_put_are_uses(self) -> None:
        self.needs_lru()
        with self.store() as store:
            for n in range(ROOM):
                put(store, [n])
            get(store, [0])
            put(store, [1])
            put(store, [100])
            put(store, [101])
            same(present(store, [0, 1, 2, 3, 4, 100, 101]), {0, 1, 4, 100, 101}, "what stays")

    def test_a_lookup_touches_nothing(self) -> None:
        self.needs_lru()
        with self.store() as store:
            for n in range(ROOM):
                put(store, [n])
            present(store, [0])
            list(store.scan(timeout_s=TIMEOUT_S))
            put(store, [100])
            same(present(store, [0, 1, 100]), {1, 100}, "what stays")

    def test_within_a_call_the_first_stays_longest(self) -> None:
        """Callers pass pages from the root down; what stays must be reachable from the root."""
        self.needs_lru()
        with self.store() as store:
            put(store, range(ROOM))
            put(store, [100, 101])
            same(present(store, range(ROOM)), set(range(ROOM - 2)), "what stays of one put")
            get(store, range(ROOM - 2))
            put(store, [102, 103, 104])
            same(present(store, range(ROOM)), set(range(ROOM - 3)), "what stays of one get")

    def test_what_a_call_found_counts_in_its_place(self) -> None:
        """A longer prompt: its first pages are there already and must not go before the new ones."""
        self.needs_lru()
        with self.store() as store:
            put(store, [0, 1])
            put(store, range(10, 10 + ROOM - 4))
            put(store, [0, 1, 2, 3])
            put(store, range(100, 100 + ROOM - 1))
            same(present(store, [0, 1, 2, 3]), {0}, "what stays")

    def test_a_call_does_not_evict_what_it_stored_or_found(self) -> None:
        self.needs(self.abilities.exact_room, "the room of this store is not exact")
        self.needs(self.abilities.eviction is not Eviction.NEVER, "this store does not evict")
        with self.store() as store:
            since = Since(store)
            put(store, [1000])
            visible = put(store, [*range(ROOM - 1), 5000, 5001, 1000])
            same(visible, EVERYTHING >> 1 | 1 << ROOM + 1, f"a put of {ROOM + 1} new objects and one that exists")
            same(present(store, [*range(ROOM), 1000, 5000]), {*range(ROOM - 1), 1000}, "what is there")
            if self.abilities.counts:
                same(since("put_refused"), 2, "objects refused")

    def test_what_can_never_fit_is_refused(self) -> None:
        with self.store() as store:
            since = Since(store)
            big = since.now().capacity_bytes + 1
            put(store, [5])
            same(store.put([name(1), name(2)], [page(1, big).data, page(2).data], TIMEOUT_S), 0b10, "a put of too much, and a page")
            require(5 in present(store, [5]), "an object was evicted for one that can never fit")
            if self.abilities.counts:
                same(since("put_refused"), 1, "objects refused")
            twice = [page(3, big).data, page(3).data]
            same(store.put([name(3), name(3)], twice, TIMEOUT_S), 0, "a put with one id twice, first too much: the first counts")
            same(present(store, [1, 2, 3]), {2}, "what is there")

    def test_one_object_may_take_everything(self) -> None:
        self.needs_lru()
        whole = ROOM * self.taken(PAGE) - self.abilities.overhead_bytes
        with self.store() as store:
            put(store, range(ROOM))
            same(put(store, [100], whole), 1, f"a put of {whole} bytes")
            same(present(store, [*range(ROOM), 100]), {100}, "what stays")
            same(get(store, [100], whole), {100}, "a get of it")

    def test_dropped_room_is_used_again(self) -> None:
        self.needs(self.abilities.exact_room, "the room of this store is not exact")
        with self.store() as store:
            for _ in range(3):
                same(put(store, range(ROOM)), EVERYTHING, f"a put of {ROOM} objects into an empty store")
                same(store.drop([name(n) for n in range(ROOM)], TIMEOUT_S), EVERYTHING, "a drop of all")
                same(store.stats(TIMEOUT_S).used_bytes, 0, "bytes in use")
