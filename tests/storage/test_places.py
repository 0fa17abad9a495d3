"""Nothing outside of the mapping becomes an address; what was given away is seen."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_ray.storage import ArenaClient, ArenaService, messages
from hicache_ray.storage.connection import Connection
from hicache_ray.storage.descriptors import Lease, Loan, Outcome, Reservation
from hicache_ray.storage.places import require_inside, unchanged
from hicache_ray.storage.segment import Segment
from hicache_ray.storage.wire import Kind, WireError
from tests.storage.conftest import PAGES
from tests.storage.objects import PAGE, TIMEOUT_S, get, name, page, put

SIZE = PAGES * PAGE
OUTSIDE = [(SIZE, 1), (SIZE - PAGE + 1, PAGE), (2**63, 1), (2**64 - 1, 2), (2**64 - PAGE, PAGE), (0, 2**64 - 1), (8, 2**64 - 8)]


@pytest.fixture
def memory(service: ArenaService) -> Segment:
    return service.arena.segment


def words(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


@pytest.mark.parametrize(("offset", "length"), OUTSIDE)
def test_memory_outside_of_the_segment_is_refused(memory: Segment, offset: int, length: int) -> None:
    require_inside(words(0, SIZE, SIZE - 5), words(SIZE, 0, 5), memory)
    with pytest.raises(WireError, match=f"outside of its segment of {SIZE} bytes"):
        require_inside(words(0, offset), words(PAGE, length), memory)
    require_inside(words(), words(), memory)


def test_a_service_that_lies_reaches_no_memory(client: ArenaClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is refused before a byte moves, and the connection is given up."""
    put(client, [1])
    exchange = Connection.exchange

    def lying(self: Connection, kind: int, body: bytes, until: float, watch_s: float = 0.0) -> bytes:
        answer = exchange(self, kind, body, until, watch_s)
        if kind == Kind.RESERVE:
            outcomes = np.array([Outcome.GRANTED], np.uint8)
            return messages.pack_reservation(Reservation(1, 10.0, outcomes, words(SIZE)))
        if kind == Kind.LEASE:
            return messages.pack_lease(Lease(1, 10.0, np.array([True]), words(SIZE - 64, PAGE, 0, 0).reshape(1, 4)))
        return answer

    monkeypatch.setattr(Connection, "exchange", lying)
    target = np.zeros(PAGE, np.uint8)
    with pytest.raises(WireError, match="outside of its segment"):
        client.get([name(1)], [target], TIMEOUT_S)
    assert not target.any()
    client._session._breaker.report(True, False)
    with pytest.raises(WireError, match="outside of its segment"):
        client.lease([name(1)], TIMEOUT_S)
    client._session._breaker.report(True, False)
    with pytest.raises(WireError, match="outside of its segment"):
        client.put([name(2)], [page(2)], TIMEOUT_S)
    monkeypatch.undo()
    client._session._breaker.report(True, False)
    assert get(client, [1]) == {1}


def test_what_was_given_away_has_changed(memory: Segment) -> None:
    loans = [Loan(n * PAGE, PAGE, 0, memory.generations[n * PAGE // 4096]) for n in range(3)]
    lease = Lease(9, 0.5, np.array([True, False, True, True, True]), np.array([*loans, Loan(64, 10, 0, 77)], np.uint64))
    assert unchanged(lease, memory).tolist() == [True, True, True, True]
    memory.generations[PAGE // 4096] += 1
    assert unchanged(lease, memory).tolist() == [True, False, True, True]
    assert [memory.unchanged(loan) for loan in loans] == [True, False, True]
    assert unchanged(Lease(0, 0.5, np.array([False]), np.empty((0, 4), np.uint64)), memory).tolist() == []
