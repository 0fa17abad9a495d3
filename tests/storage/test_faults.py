"""The service killed, frozen, restarted; a client killed in the middle of a put: an error within the deadline, then normal service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hicache_ray.errors import StoreError, StoreTimeout
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService
from hicache_ray.storage.owned import PREFIX
from tests.storage.conftest import FakeClock
from tests.storage.objects import PAGE, TAG, TIMEOUT_S, get, key, name, page, present, put
from tests.storage.services import PATIENCE_S, Process

Connect = Callable[..., ArenaClient]

WRITER = """
import sys
from hicache_ray.storage import ArenaClient, bits, messages, wire
from tests.storage.objects import PAGE, name
client = ArenaClient(sys.argv[1])
with client._session.asking(30.0) as (connection, deadline):
    reply = connection.call(wire.Kind.RESERVE, messages.pack_reserve([name(n) for n in range(64)], [PAGE] * 64, 30.0), deadline)
    assert messages.unpack_reservation(reply, 64).id
    connection.mapped.data[:] = 7
    print("reserved", flush=True)
    sys.stdin.read()
"""


class Patient(FakeClock):
    """Really passes, so that sockets time out, and can be advanced, so that a back-off need not be slept through."""

    def __call__(self) -> float:
        return self.now + time.monotonic()


def test_a_killed_service_is_an_error_and_its_successor_works(config: ArenaConfig, process: Process, connect: Connect) -> None:
    clock = Patient()
    client = connect(process.address, clock=clock)
    assert put(client, [1, 2]) == 0b11
    process.kill()
    for _ in range(3):
        with pytest.raises(StoreError):
            get(client, [1])
    successor = Process(config)
    try:
        assert {path.name for path in Path("/dev/shm").glob(f"{PREFIX}{config.name}*")} == {
            PREFIX + config.name, f"{PREFIX}{config.name}-{successor.address.incarnation}"
        }  # fmt: skip
        clock.advance(2.0)
        assert get(client, [1, 2]) == set()
        assert put(client, [1, 2]) == 0b11
        assert get(client, [1, 2]) == {1, 2}
    finally:
        successor.close()


def test_a_killed_service_in_the_middle_of_gets(process: Process, connect: Connect) -> None:
    """All calls end, as hits with the right bytes or as errors."""
    client = connect(process.address)
    put(client, range(20))
    hits = errors = 0
    for n in range(20):
        if n == 10:
            process.kill()
        try:
            hits += get(client, [n]) == {n}
        except StoreError:
            errors += 1
    assert (hits, errors) == (10, 10)


def test_a_frozen_service_costs_one_deadline_then_nothing(process: Process, connect: Connect) -> None:
    clock = Patient()
    client = connect(process.address, clock=clock)
    put(client, [1])
    process.freeze()
    with pytest.raises(StoreTimeout, match="did not answer within the deadline"):
        client.lookup([key(1)], [TAG], 0.2)
    for _ in range(100):
        with pytest.raises(StoreError, match="not asked again"):  # with a deadline that would take a day
            client.lookup([key(1)], [TAG], 1000.0)
    clock.advance(0.5)
    with pytest.raises(StoreTimeout):
        client.get([name(1)], [np.zeros(PAGE, np.uint8)], 0.2)  # type: ignore[list-item]
    process.thaw()
    clock.advance(1.0)
    assert present(client, [1]) == {1}
    assert get(client, [1]) == {1}


def test_a_put_to_a_frozen_service_ends_and_leaves_nothing(process: Process, connect: Connect) -> None:
    clock = Patient()
    client = connect(process.address, clock=clock)
    client.ping(TIMEOUT_S)
    process.freeze()
    with pytest.raises(StoreTimeout):
        client.put([name(1)], [page(1).data], 0.2)
    process.thaw()
    clock.advance(2.0)
    until = time.monotonic() + TIMEOUT_S
    while put(client, [1]) == 0:  # the service has not yet read that the first writer hung up
        assert time.monotonic() < until
    assert get(client, [1]) == {1}


def test_late_answers_meet_no_later_question(process: Process, connect: Connect) -> None:
    clock = Patient()
    client = connect(process.address, clock=clock)
    put(client, [1])
    for _ in range(5):
        process.freeze()
        with pytest.raises(StoreTimeout):
            client.lookup([key(1)], [TAG], 0.05)
        process.thaw()
        clock.advance(2.0)
        assert client.lookup([key(2)], [TAG], TIMEOUT_S)[TAG].hit == 0
        assert present(client, [1]) == {1}


def test_a_client_killed_between_reserve_and_seal(service: ArenaService, client: ArenaClient) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, service.address.socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "reserved\n"
    assert client.lookup([key(1)], [TAG], TIMEOUT_S)[TAG].pending == 1
    assert put(client, [1, 100]) == 0
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate(timeout=PATIENCE_S)
    while client.stats(TIMEOUT_S).used_bytes:
        pass  # until the service has seen the end of the connection
    assert put(client, [1, 100]) == 0b11
    assert get(client, [1, 100]) == {1, 100}
    service.check()


def test_bytes_changed_behind_the_stores_back_are_a_miss(service: ArenaService, client: ArenaClient) -> None:
    """A writer that was thought dead and wrote on: no wrong byte is served."""
    put(client, range(8))
    with client.lease([name(3)], TIMEOUT_S) as lent:
        loan = lent._lease.loans[0]
        assert loan is not None
        service.arena.segment.data[loan.offset + PAGE - 1] ^= 0x80
    assert get(client, range(8)) == {0, 1, 2, 4, 5, 6, 7}
    assert present(client, range(8)) == {0, 1, 2, 4, 5, 6, 7}
