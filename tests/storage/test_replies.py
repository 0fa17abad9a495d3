"""Answers as columns: equal to what was packed; nothing outside of the mapping becomes an address."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ray.storage import ArenaService, messages, replies, wire
from hicache_ray.storage.copying import Summed
from hicache_ray.storage.descriptors import Grant, Lease, Loan, Outcome, Reservation
from hicache_ray.storage.segment import Segment
from hicache_ray.storage.wire import Reader, WireError
from tests.storage.conftest import PAGES
from tests.storage.objects import PAGE

SIZE = PAGES * PAGE
WORDS = st.integers(0, 2**64 - 1)
fast = settings(derandomize=True, deadline=None, max_examples=60)


@pytest.fixture
def memory(service: ArenaService) -> Segment:
    return service.arena.segment


OUTSIDE = [(SIZE, 1), (SIZE - PAGE + 1, PAGE), (2**63, 1), (2**64 - 1, 2), (2**64 - PAGE, PAGE), (0, 2**64 - 1), (8, 2**64 - 8)]


@pytest.mark.parametrize(("offset", "length"), OUTSIDE)
def test_memory_outside_of_the_segment_is_refused(memory: Segment, offset: int, length: int) -> None:
    lease = Lease(1, 1.0, [None, Loan(offset, length, 0, 0)])
    with pytest.raises(WireError, match=f"outside of its segment of {SIZE} bytes"):
        replies.unpack_leased(Reader(messages.pack_lease(lease)), 2, memory)
    if length < 2**63:
        grants = Reservation(1, 1.0, [Grant(Outcome.GRANTED, offset)])
        with pytest.raises(WireError, match="outside of its segment"):
            replies.unpack_granted(Reader(messages.pack_reservation(grants)), np.array([length]), memory)


def test_a_reservation_as_columns(memory: Segment) -> None:
    """Offsets of what was not granted mean nothing, and are not looked at."""
    grants = [Grant(Outcome.EXISTS, 2**64 - 1), Grant(Outcome.GRANTED, SIZE - 5), Grant(Outcome.PENDING, 0), Grant(Outcome.GRANTED, 64)]
    body = messages.pack_reservation(Reservation(7, 2.5, grants))
    found = replies.unpack_granted(Reader(body), np.array([9, 5, 9, 0]), memory)
    assert (found.id, found.seconds) == (7, 2.5)
    assert found.exists.tolist() == [True, False, False, False]
    assert (found.granted.tolist(), found.offsets.tolist()) == ([1, 3], [SIZE - 5, 64])
    with pytest.raises(WireError):
        replies.unpack_granted(Reader(body[:-1]), np.array([9, 5, 9, 0]), memory)


def test_a_lease_as_columns(memory: Segment) -> None:
    loans = [None, Loan(0, SIZE, 2**64 - 1, 3), None, Loan(SIZE, 0, 5, 2**63)]
    found = replies.unpack_leased(Reader(messages.pack_lease(Lease(9, 0.5, loans))), 4, memory)
    assert (found.id, found.seconds, found.hits.tolist()) == (9, 0.5, [1, 3])
    assert (found.offsets.tolist(), found.lengths.tolist()) == ([0, SIZE], [SIZE, 0])
    assert (found.checksums.tolist(), found.generations.tolist()) == ([2**64 - 1, 5], [3, 2**63])
    empty = replies.unpack_leased(Reader(messages.pack_lease(Lease(0, 0.5, [None]))), 1, memory)
    assert (len(empty.hits), replies.unchanged(empty, memory).tolist()) == (0, [])


def test_what_was_given_away_has_changed(memory: Segment) -> None:
    words = np.frombuffer(memory.generations, np.uint64)
    loans = [Loan(n * PAGE, PAGE, 0, int(words[n * PAGE // 4096])) for n in range(3)]
    found = replies.unpack_leased(Reader(messages.pack_lease(Lease(9, 0.5, [*loans, Loan(64, 10, 0, 77)]))), 4, memory)
    assert replies.unchanged(found, memory).tolist() == [True, True, True, True]
    memory.generations[PAGE // 4096] += 1
    assert replies.unchanged(found, memory).tolist() == [True, False, True, True]
    assert [memory.unchanged(loan) for loan in loans] == [True, False, True]


@given(st.lists(st.tuples(WORDS, st.booleans()), max_size=20), WORDS)
@fast
def test_a_seal_says_what_the_copies_found(found: list[tuple[int, bool]], reservation: int) -> None:
    summed = Summed(np.array([word for word, _ in found], np.uint64), np.array([done for _, done in found], np.bool_))
    reader = Reader(replies.pack_sealed(reservation, summed))
    assert messages.unpack_seal(reader) == (reservation, [word if done else None for word, done in found])
    reader.end()


@given(st.lists(st.booleans(), max_size=40))
@fast
def test_flags_are_bits(flags: list[bool]) -> None:
    bits = replies.bits_of(np.array(flags, np.bool_))
    assert bits == sum(1 << i for i, flag in enumerate(flags) if flag)
    assert replies.flags_of(bits, len(flags)).tolist() == flags
    assert wire.bitset(bits, len(flags)) == np.packbits(np.array(flags, np.bool_), bitorder="little").tobytes()
