"""The client's own promises: deadlines, breaker, leases by its own clock, pool, fork."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

from hicache_ray.errors import StoreClosed, StoreError, StoreTimeout
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, ClientConfig
from hicache_ray.storage.connection import Deadline, Overloaded
from hicache_ray.storage.copying import Copier
from hicache_ray.storage.descriptors import Sums
from hicache_ray.storage.movers import Batch, Piece
from hicache_ray.storage.session import Breaker
from tests.storage.conftest import PAGES, FakeClock
from tests.storage.objects import PAGE, TAG, TIMEOUT_S, get, key, name, page, put

Connect = Callable[..., ArenaClient]


class SlowCopies(FakeClock):
    """A clock on which every look takes ``step`` seconds: the time that a copy's chunks take."""

    step = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_nobody_listens(connect: Connect, config: ArenaConfig) -> None:
    with pytest.raises(StoreClosed, match="cannot be reached: No such file"):
        put(connect(str(config.socket_path)), [1])


def test_no_time_is_no_time(client: ArenaClient) -> None:
    with pytest.raises(StoreTimeout):
        client.stats(0.0)
    assert put(client, [1]) == 1  # and nothing is held against the service


@pytest.mark.parametrize("seconds", [1e300, float("inf"), float("nan")])
def test_any_number_of_seconds_may_be_given(seconds: float, client: ArenaClient) -> None:
    target = np.zeros(PAGE, np.uint8)
    assert client.put([name(1), name(2)], [page(1), page(2)], seconds) == 0b11
    assert client.get([name(1)], [target], seconds) == 1
    assert client.lookup([key(1)], [TAG], seconds)[TAG].hit == 1
    assert (target == page(1)).all()


def test_a_read_longer_than_its_lease_is_a_miss(service: ArenaService, connect: Connect) -> None:
    """Whether or not the bytes were given to another object meanwhile (here they were not)."""
    clock = SlowCopies()
    client = connect(service.address, ClientConfig(slice_bytes=PAGE, copy_threads=1), clock=clock)
    put(client, range(20))
    clock.step = 1.0  # lease 10 s; more than 20 looks at the clock
    targets = [np.zeros(PAGE, np.uint8) for _ in range(20)]
    assert client.get([name(n) for n in range(20)], [t.data for t in targets], 1000.0) == 0
    clock.step = 0.0
    assert get(client, range(20)) == set(range(20))


def test_a_deadline_within_the_copies_keeps_what_was_read(service: ArenaService, connect: Connect) -> None:
    clock = SlowCopies()
    client = connect(service.address, ClientConfig(slice_bytes=PAGE, copy_threads=1), clock=clock)
    put(client, range(20))
    clock.step = 0.01
    targets = [np.zeros(PAGE, np.uint8) for _ in range(20)]
    hit = client.get([name(n) for n in range(20)], [t.data for t in targets], 0.2)
    assert 0 < hit.bit_count() < 20
    assert hit & (hit + 1) == 0  # the first ones
    assert all((targets[i] == page(i)).all() for i in range(hit.bit_count()))


def test_a_deadline_within_a_puts_copies_leaves_nothing(service: ArenaService, connect: Connect) -> None:
    clock = SlowCopies()
    client, other = connect(service.address, ClientConfig(slice_bytes=PAGE), clock=clock), connect(service.address)
    client.ping(TIMEOUT_S)
    clock.step = 0.01
    with pytest.raises(StoreTimeout):
        client.put([name(n) for n in range(50)], [page(n).data for n in range(50)], 0.2)
    while other.stats(TIMEOUT_S).used_bytes:
        pass  # until the service has seen the connection closed
    assert other.stats(TIMEOUT_S).objects == 0


def test_lent_views_are_judged_by_the_readers_own_clock(service: ArenaService, connect: Connect, clock: FakeClock) -> None:
    client = connect(service.address, clock=clock)
    put(client, [1])
    with client.lease([name(1)], TIMEOUT_S) as lent:
        clock.advance(service.config.lease_s - 0.1)
        assert lent.valid() == 1
        clock.advance(0.1)
        assert lent.valid() == 0


def test_lent_views_see_that_their_memory_was_given_away(config: ArenaConfig, connect: Connect, clock: FakeClock) -> None:
    with ArenaService(config, clock) as service:
        client = connect(service.address)
        put(client, range(PAGES))
        with client.lease([name(0), name(1)], TIMEOUT_S) as lent:
            clock.advance(config.lease_s)  # by the service's clock it has run out; by the reader's it has not
            assert lent.valid() == 0b11
            client.get([name(0)], [page(0)], TIMEOUT_S)  # type: ignore[list-item]
            for n in range(100, 100 + PAGES - 1):
                put(client, [n])
            assert lent.valid() == 0b01


def test_views_outlive_everything(config: ArenaConfig, connect: Connect) -> None:
    with ArenaService(config) as service:
        client = connect(service.address)
        put(client, [1])
        lent = client.lease([name(1)], TIMEOUT_S)
        client.close()
    assert lent.views[0] is not None
    assert bytes(lent.views[0]) == page(1).tobytes()
    lent.release()


def test_threads_share_a_client(client: ArenaClient) -> None:
    found: list[set[int]] = []

    def work(first: int) -> None:
        for _ in range(10):
            put(client, range(first, first + 4))
            found.append(get(client, range(first, first + 4)))

    threads = [threading.Thread(target=work, args=(4 * n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(map(min, found)) == sorted([4 * n for n in range(12)] * 10)
    assert all(len(some) == 4 for some in found)


def test_connections_of_a_client_are_bounded(service: ArenaService, connect: Connect) -> None:
    client = connect(service.address, ClientConfig(connections=1))
    with client._session.asking(TIMEOUT_S), pytest.raises(Overloaded, match="all 1 connections"):
        client.stats(0.05)
    assert put(client, [1]) == 1  # that says nothing about the service


def test_a_restarted_service_is_found_again(config: ArenaConfig, connect: Connect) -> None:
    with ArenaService(config) as first:
        client = connect(first.address)
        assert client.ping(TIMEOUT_S) == (old := first.address.incarnation)
        put(client, [1])
        lent = client.lease([name(1)], TIMEOUT_S)
    with ArenaService(config) as second:
        assert client.ping(TIMEOUT_S) == second.address.incarnation != old
        assert get(client, [1]) == set()
        assert put(client, [1]) == 1
        lent.release()  # of another incarnation: must not touch this one
        with client.lease([name(1)], TIMEOUT_S) as fresh:
            assert fresh.valid() == 1
        assert get(client, [1]) == {1}


def test_a_forked_child_may_only_close(service: ArenaService, client: ArenaClient) -> None:
    put(client, [1])
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            get(client, [1])
        except StoreClosed as error:
            code = 0 if "before a fork" in str(error) else 2
        client.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert get(client, [1]) == {1}


def test_breaker(clock: FakeClock) -> None:
    breaker = Breaker(clock, 0.5, 2.0)
    waits = []
    for _ in range(4):
        breaker.report(False, breaker.admit())
        with pytest.raises(StoreError, match="not asked again for") as caught:
            breaker.admit()
        waits.append(float(str(caught.value).split()[-2]))
        clock.advance(waits[-1])
    assert waits == [0.5, 1.0, 2.0, 2.0]
    assert breaker.admit() is True
    with pytest.raises(StoreError, match="another call is trying"):
        breaker.admit()
    breaker.report(None, True)  # the trial said nothing: the next one tries
    breaker.report(True, breaker.admit())
    assert breaker.admit() is False
    breaker.report(True, False)


def test_deadline(clock: FakeClock) -> None:
    deadline = Deadline.after(clock, 2.0)
    assert (deadline.left(), deadline.passed()) == (2.0, False)
    clock.advance(2.0)
    assert deadline.passed()
    with pytest.raises(StoreTimeout):
        deadline.left()


@pytest.mark.parametrize("numbers", [[1], [1, 2]])
def test_what_somebody_else_wrote_over_an_object_is_a_miss(
    client: ArenaClient, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksum is that of the source: a stranger's bytes in our memory, before it was sums, do not pass for ours."""
    run, run_one = Copier.run, Copier.run_one

    def overwritten(self: Copier, batch: Batch, stop: Callable[[], bool]) -> Sums:
        sums = run(self, batch, stop)
        if batch.of_source:
            for address, size in zip(batch.targets.tolist(), batch.sizes.tolist(), strict=True):
                ctypes.memset(address, 0xEE, size)
        return sums

    def one_overwritten(self: Copier, piece: Piece, of_source: bool, stop: Callable[[], bool]) -> int | None:
        found = run_one(self, piece, of_source, stop)
        if of_source:
            ctypes.memset(piece.target, 0xEE, piece.size)
        return found

    monkeypatch.setattr(Copier, "run", overwritten)
    monkeypatch.setattr(Copier, "run_one", one_overwritten)
    assert put(client, numbers) == 2 ** len(numbers) - 1
    monkeypatch.undo()
    assert get(client, numbers) == set()
    assert client.stats(TIMEOUT_S).checksum_failures == len(numbers)


def test_a_writer_that_outlives_its_reservation_seals_nothing(connect: Connect, service: ArenaService) -> None:
    """The reservation ends by the writer's own clock, whatever the deadline of the call."""
    clock = SlowCopies()
    client = connect(service.address, clock=clock)
    assert put(client, [1]) == 1
    clock.step = 40.0
    assert client.put([name(2)], [page(2)], 1000.0) == 0
    clock.step = 0.0
    assert client.get([name(2)], [bytearray(PAGE)], TIMEOUT_S) == 0
