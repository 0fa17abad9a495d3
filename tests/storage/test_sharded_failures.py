"""Fail the first, the second, ... call of a node until a script passes untouched: nothing wrong is served, and all is found afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from hicache_ray.errors import StoreError
from hicache_ray.storage import bits
from hicache_ray.storage.peers import ShardConfig
from hicache_ray.storage.sharded import ShardedStore
from hicache_ray.store import SPACE_BYTES
from tests.storage.cluster import LONG_S, Cluster
from tests.storage.objects import TAG
from tests.storage.test_sharded import PAGE, Start, get, name, page, put, seen, start

__all__ = ["start"]

IDS = [name(n, n % 4, 1 + n % 2) for n in range(12)]
CONFIGS = [ShardConfig(), ShardConfig("home", 2)]


class Nth:
    """True for the ``nth`` call of all nodes."""

    def __init__(self, nth: int) -> None:
        self.left, self.hit = nth, ""
        self._lock = threading.Lock()

    def __call__(self, call: str) -> bool:
        with self._lock:
            self.left -= 1
            if not self.left:
                self.hit = call
            return not self.left


def script(cluster: Cluster, config: ShardConfig) -> set[bytes]:
    """Every call of a store from several nodes, each of which may fail. Returns what was dropped or cleared by a call that succeeded."""
    gone: set[bytes] = set()
    stores = [cluster.client(node, config, cluster.clock) for node in cluster.nodes]

    def call(act: Callable[[ShardedStore], object], store: ShardedStore) -> bool:
        cluster.clock.advance(10.0)  # no breaker keeps the script from a node
        with suppress(StoreError):
            act(store)
            return True
        return False

    for first, store in enumerate(stores):
        call(lambda s: put(s, IDS[4 * first : 4 * first + 6]), store)  # noqa: B023
        call(lambda s: get(s, IDS), store)
        call(lambda s: seen(s, IDS), store)
    call(lend, stores[1])
    if call(lambda s: s.drop(IDS[:2], LONG_S), stores[0]):
        gone |= set(IDS[:2])
    call(lambda s: list(s.scan(b"", LONG_S)), stores[1])
    cluster.restart("n2", keep_bytes=True)
    with suppress(StoreError):
        for announcer in cluster.announcers.values():
            announcer.step()
    call(lambda s: get(s, IDS), stores[0])
    if call(lambda s: s.clear(LONG_S, bytes([2]) * SPACE_BYTES), stores[2]):
        gone |= {id for id in IDS if id[0] == 2}
    call(lambda s: put(s, IDS[6:8]), stores[1])
    return gone - set(IDS[6:8])


def lend(store: ShardedStore) -> None:
    with store.lease(IDS, LONG_S) as lent:
        for i in bits.each(lent.valid()):
            assert bytes(lent.views[i]) == page(IDS[i])  # type: ignore[arg-type]


@pytest.mark.parametrize("config", CONFIGS, ids=["writer", "home x2"])
def test_any_call_of_a_node_may_fail(start: Start, config: ShardConfig) -> None:
    failed: set[str] = set()
    for nth in range(1, 1000):
        cluster, fault = start(3, ["a", "a", "b"]), Nth(nth)
        cluster.announce()
        for node in cluster.nodes.values():
            node.fail = fault
        gone = script(cluster, config)
        cluster.check()
        for node in cluster.nodes.values():
            node.fail = lambda call: False
        cluster.clock.advance(1000.0)  # all breakers, and everything is said again
        cluster.announce()
        held = {id for node in cluster.nodes.values() for id in node.inner.scan()}
        assert not held & gone
        reader = cluster.client("n0", config)
        found = {IDS[i] for i in bits.each(seen(reader, IDS)[0])}
        assert found >= held
        targets = [bytearray(PAGE) for _ in IDS]
        read = reader.get(IDS, targets, LONG_S)
        assert {IDS[i] for i in bits.each(read)} == held
        assert all(bytes(targets[i]) == page(IDS[i]) for i in bits.each(read))
        answer = reader.lookup([id[:48] for id in IDS], [TAG], LONG_S)[TAG]  # what was asked for in vain is known to be gone
        assert {IDS[i] for i in bits.each(answer.hit)} == held
        assert put(reader, IDS) == (1 << len(IDS)) - 1
        cluster.close()
        if not fault.hit:
            break
        failed.add(fault.hit)
    assert failed >= {"put", "get", "lookup", "lease", "drop", "scan", "clear", "epoch", "announce", "where", "holders", "forget"}
