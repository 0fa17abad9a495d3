"""Every call of a script fails once: the 1st, the 2nd, ... until the script passes untouched. After each step everything adds up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from hicache_ray.errors import StoreError, StoreTimeout
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, FaultyStore, MemoryStore
from hicache_ray.storage.connection import Connection
from hicache_ray.storage.faults import ANY, FAULTS
from hicache_ray.storage.wire import Kind
from hicache_ray.store import Store
from tests.storage.conftest import FakeClock
from tests.storage.objects import PAGE, TIMEOUT_S, get, name, page, present, put

ROOM = 8
MOST = 200  # calls of a script

Open = Callable[[], Store]
Check = Callable[[], None]
Script = Callable[[Open, bool], Iterator[tuple[Store, Callable[[], object]]]]


def script(open_one: Open, damaged: bool) -> Iterator[tuple[Store, Callable[[], object]]]:
    """(handle, one step): put, get, evict, lease, drop, clear a part, restart, and all of it again."""
    store = open_one()
    for first in (0, 4, 8):  # the third put evicts
        yield store, lambda n=first: put(store, range(n, n + 4))  # type: ignore[misc]
        yield store, lambda n=first: get(store, range(n, n + 4))  # type: ignore[misc]
    yield store, lambda: present(store, range(12))
    yield store, lambda: lent(store, damaged)
    yield store, lambda: store.drop([name(9), name(10)], TIMEOUT_S)
    yield store, lambda: get(store, range(12))
    store.close()
    store = open_one()
    yield store, lambda: put(store, [20, 21, 8])
    yield store, lambda: store.clear(TIMEOUT_S, name(20))
    yield store, lambda: get(store, [20, 21, 8])
    yield store, lambda: list(store.scan(timeout_s=TIMEOUT_S))
    yield store, lambda: store.clear(TIMEOUT_S)
    yield store, lambda: put(store, range(4))
    yield store, lambda: get(store, range(4))
    store.close()


def one_by_one(open_one: Open, damaged: bool) -> Iterator[tuple[Store, Callable[[], object]]]:
    """Puts of one object: all but the first two of a handle go to its spare slot."""
    yield from singly(open_one(), range(9))  # the eighth evicts
    yield from singly(open_one(), range(5, 9))


def singly(store: Store, numbers: range) -> Iterator[tuple[Store, Callable[[], object]]]:
    for number in numbers:
        yield store, lambda n=number: put(store, [n])  # type: ignore[misc]
    yield store, lambda: store.drop([name(8)], TIMEOUT_S)
    yield store, lambda: put(store, [8])
    yield store, lambda: get(store, range(9))
    store.close()


def lent(store: Store, damaged: bool) -> None:
    """What is valid after it was read is what was put, unless it was damaged: a lease is no checksum."""
    numbers = [8, 9, 100]
    with store.lease([name(n) for n in numbers], TIMEOUT_S) as views:
        read = [None if view is None else bytes(view) for view in views.views]
        valid = views.valid()
    assert damaged or all(read[i] == page(n).tobytes() for i, n in enumerate(numbers) if valid >> i & 1)


def play(open_one: Open, check: Check, after_failure: Callable[[], None], damaged: bool = False, script: Script = script) -> int:
    """Runs the script; returns how many of its steps failed."""
    failed = 0
    for _, step in script(open_one, damaged):
        try:
            step()
        except StoreError:
            failed += 1
            after_failure()
        check()
    return failed


# -- a memory store behind faults of every kind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", FAULTS)
def test_a_memory_store(op: str) -> None:
    struck = {}
    for kind in FAULTS[op]:
        for nth in range(1, MOST):
            memory = Reopened(ROOM * PAGE)
            store = FaultyStore(memory, lambda _: None)
            store.fault(op, kind, nth)
            failed = play(lambda store=store: store, memory.check, lambda: None, kind in ("flip", "torn"))  # type: ignore[misc]
            assert memory.stats(TIMEOUT_S).leases == 0
            if store.planned():
                break
            assert failed == (kind in ("error", "hang", "lost"))
        struck[kind] = nth - 1
    assert len(set(struck.values())) == 1  # each kind struck every call
    expected = {"put": 5, "get": 6, "lookup": 1, "lease": 1, "drop": 1, "clear": 2, "scan": 1, ANY: 17}
    assert set(struck.values()) == {expected.get(op, 0)}


class Reopened(MemoryStore):
    """Outlives its handles."""

    def close(self) -> None:
        pass


# -- a client whose messages are lost -------------------------------------------------------------------------------------------------


@dataclass
class Wire:
    """Loses the ``nth`` message of a client from now: before the service has it, or its answer. ``kinds``: of the messages so far."""

    nth: int = 0
    lose: str = "question"
    kinds: list[str] = field(default_factory=list)

    def around(self, kind: int, send: Callable[[], Any]) -> Any:
        self.kinds.append(Kind(kind).name)
        hit = len(self.kinds) == self.nth
        if hit and self.lose == "question":
            raise StoreTimeout("injected: lost on the way there")
        answer = send()
        if hit:
            raise StoreTimeout("injected: lost on the way back")
        return answer


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    found, exchange, tell = Wire(), Connection.exchange, Connection.tell

    def lossy_exchange(self: Connection, kind: int, *args: Any) -> Any:
        return found.around(kind, lambda: exchange(self, kind, *args))

    def lossy_tell(self: Connection, kind: int, *args: Any) -> Any:
        return found.around(kind, lambda: tell(self, kind, *args))

    monkeypatch.setattr(Connection, "exchange", lossy_exchange)
    monkeypatch.setattr(Connection, "tell", lossy_tell)
    return found


@dataclass
class Node:
    """A service, and clients that connect to it. ``restarts``: every further client finds a new incarnation."""

    config: ArenaConfig
    clock: FakeClock
    restarts: bool
    service: ArenaService = field(init=False)
    opened: int = 0

    def start(self) -> None:
        self.service = ArenaService(ArenaConfig(self.config.name, ROOM * PAGE, slab_bytes=PAGE), self.clock).start()
        self.service.arena.index.spares.share = ROOM  # one slot

    def open(self) -> ArenaClient:
        if self.opened and self.restarts:
            self.close()
            self.start()
        self.opened += 1
        return ArenaClient(self.service.address, clock=self.clock)

    def close(self) -> None:
        self.service.check()
        self.service.close()


@pytest.fixture(params=[False, True], ids=["reopened", "restarted"])
def node(request: pytest.FixtureRequest, config: ArenaConfig, clock: FakeClock) -> Iterator[Node]:
    made = Node(config, clock, request.param)
    made.start()
    yield made
    made.close()


@pytest.mark.parametrize("lose", ["question", "answer"])
@pytest.mark.parametrize(
    ("script", "kinds"),
    [
        (script, {"HELLO", "RESERVE", "SEAL", "LEASE", "RELEASE", "LOOKUP", "DROP", "CLEAR", "SCAN"}),
        (one_by_one, {"HELLO", "RESERVE", "SEAL", "WRITE", "LEASE", "RELEASE", "DROP"}),
    ],
    ids=["several", "one by one"],
)
def test_an_arena_over_a_socket(lose: str, script: Script, kinds: set[str], wire: Wire, node: Node, clock: FakeClock) -> None:
    """Whatever message is lost, nothing stays reserved or leased for longer than it may, and no wrong byte is served."""
    for nth in range(1, MOST):
        wire.nth, wire.lose = nth, lose
        wire.kinds.clear()
        failed = play(
            node.open,
            lambda: node.service.check(),
            lambda: clock.advance(2.0),  # the client leaves a failed store alone for a while
            script=script,
        )
        wire.nth, untouched, seen = 0, nth > len(wire.kinds), set(wire.kinds)
        assert failed == 0 if untouched else failed <= 1
        clock.advance(node.service.config.lease_s)  # what a lost release left
        assert node.service.stats().leases == 0
        assert_empties(node)
        if untouched:
            break
    assert untouched
    assert seen == kinds


def assert_empties(node: Node) -> None:
    """After a clear nothing is left, whatever was lost before."""
    store = ArenaClient(node.service.address, clock=node.clock)
    store.clear(TIMEOUT_S)
    while (stats := node.service.stats()).used_bytes or stats.spare_bytes:
        pass  # until the service has seen that a broken connection is closed
    assert put(store, range(ROOM)) == (1 << ROOM) - 1
    assert get(store, range(ROOM)) == set(range(ROOM))
    store.clear(TIMEOUT_S)
    store.close()
    node.service.check()
