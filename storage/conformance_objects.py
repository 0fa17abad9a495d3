"""Rules about objects: what goes in comes out, or is a miss, or is refused with a sentence."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pyarrow as pa

from hicache_ray.errors import StoreClosed, StoreError
from hicache_ray.storage.conformance_kit import (
    PAGE,
    TAG,
    TIMEOUT_S,
    Rules,
    Since,
    get,
    key,
    name,
    page,
    present,
    put,
    refused,
    require,
    same,
)
from hicache_ray.store import SPACE_BYTES, TAG_BYTES, Store

MANY = 20_000
SIZES = (0, 1, 63, 64, 4096, PAGE - 1, PAGE, 300_000, 700_001)


class ObjectRules(Rules):
    def test_it_is_a_store(self) -> None:
        with self.store() as store:
            require(isinstance(store, Store), f"a {type(store).__name__} lacks methods of the Store protocol")

    def test_what_was_put_is_read_back(self) -> None:
        with self.store() as store:
            since = Since(store)
            same(put(store, range(10)), 0b1111111111, "a put of ten objects")
            same(present(store, range(12)), set(range(10)), "a lookup")
            same(get(store, [3, 11, 7]), {3, 7}, "a get")
            same(since.now().objects, 10, "objects")
            if self.abilities.counts:
                same((since("puts"), since("gets"), since("get_misses")), (10, 3, 1), "puts, gets, misses counted")

    def test_objects_of_any_size(self) -> None:
        with self.store() as store:
            for size in SIZES:
                same(put(store, [1], size), 1, f"a put of {size} bytes")
                same(get(store, [1], size), {1}, f"a get of {size} bytes")
                same(store.drop([name(1)], TIMEOUT_S), 1, f"a drop of {size} bytes")

    def test_any_contiguous_buffer_is_a_source_and_a_target(self) -> None:
        floats = np.linspace(0, 1, PAGE // 8)
        sources = [floats, pa.py_buffer(floats.tobytes()), memoryview(floats.data), bytearray(floats.tobytes()), floats.tobytes()]
        targets = [np.zeros(PAGE // 8), np.zeros(PAGE, np.uint8), memoryview(bytearray(PAGE)), bytearray(PAGE), pa.allocate_buffer(PAGE)]
        ids = [name(i) for i in range(5)]
        with self.store() as store:
            same(store.put(ids, sources, TIMEOUT_S), 0b11111, "a put of an array, an Arrow buffer, a memoryview, a bytearray, bytes")
            same(store.get(ids, targets, TIMEOUT_S), 0b11111, "a get into them")
            require(all(bytes(memoryview(target)) == floats.tobytes() for target in targets), "other bytes were read than put")

    def test_a_source_belongs_to_its_caller_again(self) -> None:
        source = page(1).copy()
        with self.store() as store:
            store.put([name(1)], [source.data], TIMEOUT_S)
            source[:] = 0
            same(get(store, [1]), {1}, "a get after the source was overwritten")

    def test_a_target_of_another_length_is_a_miss(self) -> None:
        with self.store() as store:
            put(store, [1])
            for size in (PAGE - 1, PAGE + 1, 0):
                same(get(store, [1], size), set(), f"a get of {PAGE} bytes into {size}")
            same(get(store, [1]), {1}, "a get of the right length afterwards")

    def test_bad_buffers_are_refused_and_say_why(self) -> None:
        with self.store() as store:
            put(store, [1])
            refused(lambda: store.get([name(1)], [memoryview(bytes(PAGE))], TIMEOUT_S), "a read-only target", says="read-only")
            column = np.zeros((4, 4))[:, 1]
            mixed = [page(2), column]
            refused(lambda: store.put([name(2), name(5)], mixed, TIMEOUT_S), "a source that is not contiguous", says="contiguous")
            one = page(3)
            refused(lambda: store.put([name(3), name(4)], [one], TIMEOUT_S), "more ids than sources", StoreError, ValueError)
            refused(lambda: store.get([name(3), name(4)], [one], TIMEOUT_S), "more ids than targets", StoreError, ValueError)
            same(present(store, [1, 2, 3, 4, 5]), {1}, "a lookup afterwards")

    def test_bad_ids_are_refused_and_say_why(self) -> None:
        with self.store() as store:
            wrong = "id has 64 bytes, not 3"
            refused(lambda: store.put([b"abc"], [b"abc"], TIMEOUT_S), "a put with a short id", says=wrong)
            refused(lambda: store.get([b"abc"], [bytearray(3)], TIMEOUT_S), "a get with a short id", says=wrong)
            refused(lambda: store.lease([b"abc"], TIMEOUT_S), "a lease with a short id", says=wrong)
            refused(lambda: store.drop([b"abc"], TIMEOUT_S), "a drop with a short id", says=wrong)
            refused(lambda: store.lookup([b"abc"], [TAG], TIMEOUT_S), "a short key", says="key has 48 bytes, not 3")
            refused(lambda: store.lookup([key(1)], [b"ab"], TIMEOUT_S), "a short tag", says="tag has 16 bytes, not 2")

    def test_empty_batches(self) -> None:
        with self.store() as store:
            same(store.put([], [], TIMEOUT_S), 0, "a put of nothing")
            same(store.get([], [], TIMEOUT_S), 0, "a get of nothing")
            same(store.drop([], TIMEOUT_S), 0, "a drop of nothing")
            same(store.lookup([], [TAG], TIMEOUT_S)[TAG].hit, 0, "a lookup of no key")
            same(store.lookup([key(1)], [], TIMEOUT_S), {}, "a lookup of no tag")
            with store.lease([], TIMEOUT_S) as lent:
                same((list(lent.views), lent.valid()), ([], 0), "a lease of nothing")

    def test_batches_of_any_length(self) -> None:
        """Whatever a message of the store holds."""
        numbers = range(MANY)
        with self.store() as store:
            put(store, [0, MANY - 1])
            same(present(store, numbers), {0, MANY - 1}, f"a lookup of {MANY} keys")
            same(store.get([name(n) for n in numbers], [bytearray() for _ in numbers], TIMEOUT_S), 0, f"a get of {MANY} into nothing")
            same(store.drop([name(n) for n in numbers], TIMEOUT_S), 1 | 1 << MANY - 1, f"a drop of {MANY}")

    def test_an_existing_object_is_kept(self) -> None:
        with self.store() as store:
            put(store, [1])
            same(store.put([name(1)], [page(2).data], TIMEOUT_S), 1, "a put of an object that exists")
            same(get(store, [1]), {1}, "a get of it")

    def test_the_same_id_twice_in_one_call(self) -> None:
        with self.store() as store:
            same(store.put([name(1), name(1)], [page(1).data, page(2).data], TIMEOUT_S), 0b11, "a put with one id twice")
            same(get(store, [1, 1]), {1}, "a get of it: the first counts")
            same(store.stats(TIMEOUT_S).objects, 1, "objects")
            same(store.drop([name(1), name(1)], TIMEOUT_S), 0b01, "a drop with one id twice")

    def test_one_lookup_answers_for_every_tag(self) -> None:
        one, two, none = (bytes([n]) * TAG_BYTES for n in (1, 2, 3))
        with self.store() as store:
            store.put([key(0) + one, key(2) + one, key(1) + two], [page(n).data for n in range(3)], TIMEOUT_S)
            found = store.lookup([key(n) for n in range(3)], [one, two, none], TIMEOUT_S)
            same({tag: answer.hit for tag, answer in found.items()}, {one: 0b101, two: 0b010, none: 0}, "hits")
            same([answer.pending | answer.retry for answer in found.values()], [0, 0, 0], "pending or to be retried")

    def test_drop_says_what_existed(self) -> None:
        with self.store() as store:
            put(store, range(6))
            same(store.drop([name(1), name(9), name(3)], TIMEOUT_S), 0b101, "a drop of one that is not there and two that are")
            same(present(store, range(6)), {0, 2, 4, 5}, "a lookup")
            same(get(store, range(6)), {0, 2, 4, 5}, "a get")
            same(put(store, [1]), 1, "a put of what was dropped")
            same(get(store, [1]), {1}, "a get of it")

    def test_clear_removes_everything(self) -> None:
        with self.store() as store:
            put(store, range(6))
            same(store.clear(TIMEOUT_S), 6, "objects cleared")
            same(present(store, range(6)), set(), "a lookup")
            same(list(store.scan(timeout_s=TIMEOUT_S)), [], "a scan")
            stats = store.stats(TIMEOUT_S)
            same((stats.objects, stats.used_bytes), (0, 0), "objects and bytes")
            same(store.clear(TIMEOUT_S), 0, "objects cleared a second time")
            same(put(store, range(6)), 0b111111, "a put afterwards")

    def test_clear_by_prefix(self) -> None:
        """A namespace goes as a whole, and nothing else does."""
        ids = [key(n, space) + TAG for space in (1, 2) for n in range(4)]
        with self.store() as store:
            same(store.put(ids, [page(n).data for n in range(8)], TIMEOUT_S), 0xFF, "a put into two namespaces")
            mine = ids[0][:SPACE_BYTES]
            same(store.clear(TIMEOUT_S, mine), 4, "objects of the namespace cleared")
            same(set(store.scan(timeout_s=TIMEOUT_S)), set(ids[4:]), "what a scan still names")
            same(store.clear(TIMEOUT_S, mine), 0, "objects cleared a second time")
            same(store.clear(TIMEOUT_S, ids[4]), 1, "objects cleared by a whole id")
            same(store.clear(TIMEOUT_S, ids[5] + b"more"), 0, "objects cleared by more than an id")
            same(store.stats(TIMEOUT_S).objects, 3, "objects")

    def test_scan_names_what_is_visible(self) -> None:
        with self.store() as store:
            put(store, range(20))
            store.drop([name(7)], TIMEOUT_S)
            found = list(store.scan(timeout_s=TIMEOUT_S))
            same(sorted(found), [name(n) for n in range(20) if n != 7], "a scan")
            same(list(store.scan(key(3), TIMEOUT_S)), [name(3)], "a scan of one key")
            same(list(store.scan(b"\xff", TIMEOUT_S)), [], "a scan of another namespace")
            same(list(store.scan(name(1) + b"longer than an id", TIMEOUT_S)), [], "a scan of more than an id")
            started = store.scan(timeout_s=TIMEOUT_S)
            store.clear(TIMEOUT_S)
            same(len(set(started)), 19, "what a scan names that began before a clear")

    def test_descriptions(self) -> None:
        self.needs(self.abilities.describes, "this store keeps no records")
        with self.store() as store:
            store.describe(b"\x00\xff", {"model": "a"}, TIMEOUT_S)
            store.describe(b"\x01", {"model": "b", "größe": "ü"}, TIMEOUT_S)
            store.describe(b"\x00\xff", {"model": "c"}, TIMEOUT_S)
            found = store.described(TIMEOUT_S)
            same(found.get(b"\x00\xff"), {"model": "c"}, "a record that was replaced")
            same(found.get(b"\x01"), {"model": "b", "größe": "ü"}, "a record")
            store.clear(TIMEOUT_S)
            same(store.described(TIMEOUT_S).get(b"\x01"), {"model": "b", "größe": "ü"}, "a record after a clear of objects")

    def test_a_flipped_bit_is_a_miss_and_is_gone_then(self) -> None:
        self.needs(self.abilities.damages, "this store has no damage(id)")
        with self.store() as store:
            damage = store.damage  # type: ignore[attr-defined]
            put(store, [1, 2, 3])
            require(damage(name(1)), "damage(id) says that there is no such object")
            require(not damage(name(9)), "damage(id) says that it damaged what is not there")
            since = Since(store)
            same(get(store, [1, 2, 3]), {2, 3}, "a get of three objects, one damaged")
            same(present(store, [1, 2, 3]), {2, 3}, "a lookup afterwards")
            same((since("objects"), since("checksum_failures")), (-1, 1), "objects gone, and checksums that failed")
            same(put(store, [1]), 1, "a put in the place of a damaged object")
            same(get(store, [1]), {1}, "a get of it")

    def test_no_time_is_an_answer_or_an_error(self) -> None:
        """And is held against nobody: the next call with time is answered."""
        with self.store() as store:
            put(store, [1])
            for call in (lambda: store.stats(0.0), lambda: store.lookup([key(1)], [TAG], 0.0), lambda: store.clear(0.0, b"\xff")):
                with suppress(StoreError):
                    call()
            same(get(store, [1]), {1}, "a get after calls without time")

    def test_a_closed_handle_says_so(self) -> None:
        with self.store() as store:
            put(store, [1])
            store.close()
            store.close()
            calls = {
                "lookup": lambda: store.lookup([key(1)], [TAG], TIMEOUT_S),
                "put": lambda: put(store, [2]),
                "get": lambda: get(store, [1]),
                "lease": lambda: store.lease([name(1)], TIMEOUT_S),
                "drop": lambda: store.drop([name(1)], TIMEOUT_S),
                "clear": lambda: store.clear(TIMEOUT_S),
                "scan": lambda: list(store.scan(timeout_s=TIMEOUT_S)),
                "describe": lambda: store.describe(b"\x01", {}, TIMEOUT_S),
                "described": lambda: store.described(TIMEOUT_S),
                "stats": lambda: store.stats(TIMEOUT_S),
            }
            for what, call in calls.items():
                refused(call, f"{what} of a closed handle", StoreClosed)
