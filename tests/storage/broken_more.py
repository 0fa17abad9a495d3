"""More stores with one fault each: small ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from hicache_ray.errors import StoreError
from hicache_ray.storage import MemoryStore
from hicache_ray.storage.conformance import Abilities, Clock
from hicache_ray.storage.memory import MemoryLent
from hicache_ray.store import TAG_BYTES, Answer, Bytes, Store
from tests.storage import broken
from tests.storage.stores import LEASE_S, Staged, Unverified, hold_staged


class Unfinished(MemoryStore):
    scan = None  # type: ignore[assignment]


class Miscounts(MemoryStore):
    def stats(self, timeout_s: float) -> Any:
        return replace(super().stats(timeout_s), get_misses=0)


class NeverEmpty(MemoryStore):
    """Takes no object of 0 bytes."""

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        return super().put(ids, sources, timeout_s) if all(len(source) for source in sources) else 0


class BytesOnly(MemoryStore):
    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        if not all(isinstance(source, bytes | memoryview) for source in sources):
            raise StoreError("only bytes")
        return super().put(ids, sources, timeout_s)


class Lenient(MemoryStore):
    """Shrugs at a bad id."""

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        try:
            return super().drop(ids, timeout_s)
        except StoreError:
            return 0


class HalfDone(MemoryStore):
    """Stores what comes before a bad buffer."""

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        pairs = enumerate(zip(ids, sources, strict=True))
        return sum([super(HalfDone, self).put([id], [source], timeout_s) << i for i, (id, source) in pairs])


class NoEmptyBatch(MemoryStore):
    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        if not ids:
            raise StoreError("nothing to drop")
        return super().drop(ids, timeout_s)


class ShortFrames(MemoryStore):
    """Looks at 16,384 keys of a lookup."""

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        return super().lookup(keys[:16384], tags, timeout_s)


class OneTag(MemoryStore):
    """Answers for the first tag, whatever the tag."""

    def lookup(self, keys: Sequence[bytes], tags: Sequence[bytes], timeout_s: float) -> Mapping[bytes, Answer]:
        found = super().lookup(keys, tags, timeout_s)
        return dict.fromkeys(tags, found[tags[0]])


class Leftover(MemoryStore):
    """Clears all but one."""

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        return self.drop([id for id in self.scan(prefix) if id[:-TAG_BYTES][-1:] != b"\0"], timeout_s).bit_count()


class WholeClear(MemoryStore):
    """Knows no prefix."""

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        return super().clear(timeout_s)


class LateScan(MemoryStore):
    """Scans when it is read, not when it is asked."""

    def scan(self, prefix: bytes = b"", timeout_s: float = 10.0) -> Iterator[bytes]:
        yield from super().scan(prefix, timeout_s)


class FirstRecord(MemoryStore):
    def describe(self, digest: bytes, record: Mapping[str, str], timeout_s: float) -> None:
        super().describe(digest, self.described(timeout_s).get(digest, record), timeout_s)


class Sulks(MemoryStore):
    """A call without time is held against all later ones."""

    def stats(self, timeout_s: float) -> Any:
        self._closed = timeout_s == 0.0
        return super().stats(timeout_s)


class FirstInFirstOut(MemoryStore):
    def _use(self, ids: Sequence[bytes]) -> None:
        pass


class NewestFirst(MemoryStore):
    """What was used last goes first."""

    def _use(self, ids: Sequence[bytes]) -> None:
        for id in ids:
            self._objects.move_to_end(id, last=False)


class Leaks(MemoryStore):
    """Room of what was dropped is lost."""

    def drop(self, ids: Sequence[bytes], timeout_s: float) -> int:
        used = self._stats.used_bytes
        found = super().drop(ids, timeout_s)
        self._count(used_bytes=(used - self._stats.used_bytes) // 2)
        return found

    def check(self) -> None:
        pass


class SmallOnly(MemoryStore):
    def _make_room(self, wanted: int, keep: set[bytes]) -> bool:
        return wanted <= self._stats.capacity_bytes // 2 and super()._make_room(wanted, keep)


class Greedy(MemoryStore):
    """Evicts what it stored a moment ago in the same call."""

    def _make_room(self, wanted: int, keep: set[bytes]) -> bool:
        return super()._make_room(wanted, set())

    def _use(self, ids: Sequence[bytes]) -> None:
        super()._use([id for id in ids if id in self._objects])


class NoFloor(MemoryStore):
    """A capacity of one page less than it was given."""

    def __init__(self, capacity_bytes: int, *args: Any) -> None:
        super().__init__(capacity_bytes - 1, *args)


class ReadsBackwards(MemoryStore):
    """What a put found already counts as older than what it stored."""

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        there = [id for id in ids if id in self._objects]
        visible = super().put(ids, sources, timeout_s)
        for id in there:
            self._objects.move_to_end(id, last=False)
        return visible


class LentIsNoUse(MemoryStore):
    def lease(self, ids: Sequence[bytes], timeout_s: float) -> MemoryLent:
        order = list(self._objects)
        lent = super().lease(ids, timeout_s)
        for id in order:
            self._objects.move_to_end(id)
        return lent


class TakesBack(MemoryStore):
    """The views go with the handle."""

    def close(self) -> None:
        for lent in self._leases.values():
            for view in lent.views:
                if view is not None:
                    view.release()
        super().close()


class DropsLent(MemoryStore):
    """A clear ends every lease."""

    def clear(self, timeout_s: float, prefix: bytes = b"") -> int:
        for lent in list(self._leases.values()):
            lent.release()
        return super().clear(timeout_s, prefix)


class NoLimit(MemoryStore):
    """Its gets take as long as they take."""


class SharedBuffer(Unverified):
    """All gets go through one buffer."""

    def get(self, ids: Sequence[bytes], targets: Sequence[Bytes], timeout_s: float) -> int:
        self.buffers = [bytearray(len(target)) for target in targets]
        hit = super().get(ids, self.buffers, timeout_s)
        time.sleep(0.001)  # so that others come in between
        for target, buffer in zip(targets, self.buffers, strict=True):
            memoryview(target)[:] = memoryview(buffer)[: len(target)]
        return hit


class CountsTwice(MemoryStore):
    """Every put adds an object."""

    again = 0

    def put(self, ids: Sequence[bytes], sources: Sequence[Bytes], timeout_s: float) -> int:
        self.again += sum(id in self._objects for id in ids)
        return super().put(ids, sources, timeout_s)

    def stats(self, timeout_s: float) -> Any:
        found = super().stats(timeout_s)
        return replace(found, objects=found.objects + self.again)


#: Every rule, and a store that breaks it.
BROKEN: Sequence[tuple[type[MemoryStore], str]] = (
    (Unverified, "a_flipped_bit_is_a_miss_and_is_gone_then"),
    (broken.EvictsLeased, "leased_bytes_are_not_reused"),
    (broken.OneTooMany, "the_cap_is_a_cap"),
    (broken.NoFence, "a_clear_is_a_fence"),
    (broken.ClearsTooMuch, "a_clear_fences_its_prefix_only"),
    (broken.TooSoon, "nothing_is_visible_before_it_is_complete"),
    (broken.LookupTouches, "a_lookup_touches_nothing"),
    (broken.LastWins, "the_same_id_twice_in_one_call"),
    (broken.Overwrites, "an_existing_object_is_kept"),
    (broken.Truncates, "a_target_of_another_length_is_a_miss"),
    (broken.Borrows, "a_source_belongs_to_its_caller_again"),
    (broken.ForEver, "a_dead_reader_does_not_pin_for_ever"),
    (broken.Forgets, "leased_bytes_are_not_reused"),
    (broken.NewestGoes, "within_a_call_the_first_stays_longest"),
    (broken.EvictsFirst, "what_can_never_fit_is_refused"),
    (broken.NeverPending, "a_put_under_way_is_pending"),
    (broken.StaysOpen, "a_closed_handle_says_so"),
    (broken.Boasts, "drop_says_what_existed"),
    (Unfinished, "it_is_a_store"),
    (Miscounts, "what_was_put_is_read_back"),
    (NeverEmpty, "objects_of_any_size"),
    (NeverEmpty, "leases_of_any_size"),
    (BytesOnly, "any_contiguous_buffer_is_a_source_and_a_target"),
    (HalfDone, "bad_buffers_are_refused_and_say_why"),
    (Lenient, "bad_ids_are_refused_and_say_why"),
    (NoEmptyBatch, "empty_batches"),
    (ShortFrames, "batches_of_any_length"),
    (OneTag, "one_lookup_answers_for_every_tag"),
    (Leftover, "clear_removes_everything"),
    (WholeClear, "clear_by_prefix"),
    (LateScan, "scan_names_what_is_visible"),
    (FirstRecord, "descriptions"),
    (Sulks, "no_time_is_an_answer_or_an_error"),
    (FirstInFirstOut, "a_read_and_a_second_put_are_uses"),
    (NewestFirst, "the_oldest_goes"),
    (Leaks, "dropped_room_is_used_again"),
    (SmallOnly, "one_object_may_take_everything"),
    (Greedy, "a_call_does_not_evict_what_it_stored_or_found"),
    (NoFloor, "what_it_has_room_for_fits"),
    (ReadsBackwards, "what_a_call_found_counts_in_its_place"),
    (LentIsNoUse, "a_lease_is_a_use"),
    (broken.Forgets, "a_lease_lends_the_bytes"),
    (broken.ForEver, "a_lease_runs_out"),
    (DropsLent, "a_lease_outlives_a_drop_and_a_clear"),
    (TakesBack, "views_outlive_the_handle"),
    (NoLimit, "a_get_longer_than_its_lease_is_a_miss"),
    (SharedBuffer, "threads_share_a_handle"),
    (CountsTwice, "two_who_put_the_same_both_find_it"),
    (broken.Overtaken, "a_put_under_way_is_put_once"),
    (broken.DropsVisibleOnly, "a_drop_revokes_a_put_under_way"),
)


def maker(kind: type[MemoryStore]) -> tuple[Callable[[int], AbstractContextManager[Store]], Abilities]:
    """As the conformance suite wants it."""
    clock = Clock()

    @contextmanager
    def make(capacity_bytes: int) -> Iterator[Store]:
        yield kind(capacity_bytes, LEASE_S, clock)

    hold = hold_staged if issubclass(kind, Staged) else None
    return make, Abilities(clock=clock, hold=hold, gets_by_lease=kind is NoLimit)
