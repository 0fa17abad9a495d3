"""T066: a data node leaves during a read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache_ray.storage import FaultyStore
from hicache_ray.storage.peers import ShardConfig
from hicache_ray.testing import Served, Stack, full
from tests.storage.cluster import Cluster

PROMPT = list(range(1, 514))
ROOM = 1 << 24


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    opened = Cluster([ROOM] * 3, ["rack0", "rack1", "rack2"])
    opened.announce()
    yield opened
    opened.close()
    opened.check()


def stack(cluster: Cluster, node: str, replicas: int) -> Stack:
    return Stack(page=64, pools={"full": full()}, store=FaultyStore(cluster.client(node, ShardConfig(replicas=replicas))))


def written(cluster: Cluster, replicas: int) -> None:
    """Pages 0 to 3 by one node, 4 to 7 by another one that found those."""
    first = stack(cluster, "n1", replicas)
    assert first.put(PROMPT[:257]) == Served(0, 0, 0, 257)
    first.settle()
    second = stack(cluster, "n2", replicas)
    assert second.put(PROMPT) == Served(0, 0, 256, 257)
    second.settle()


@pytest.mark.parametrize(("replicas", "reused"), [(1, 256), (2, 512)])
def test_t066_what_the_others_have_is_reused(cluster: Cluster, replicas: int, reused: int) -> None:
    written(cluster, replicas)
    if replicas == 1:
        assert [node.inner.stats(1.0).objects for node in cluster.nodes.values()] == [0, 4, 4]
    reader = stack(cluster, "n0", replicas)
    reader.prefetch("r", PROMPT)
    reader.step()  # the lookup: all 8 pages are there
    assert reader.probe(PROMPT).l3 == 512
    cluster.nodes["n2"].up = False
    assert reader.load("r") == reused
    assert reader.read(PROMPT, "full") == reader.made(PROMPT, "full")
    assert reader.errors == {}
    reader.settle()
    reader.audit()


def test_t066_later_puts_go_to_the_others(cluster: Cluster) -> None:
    written(cluster, 1)
    cluster.lose("n2")
    cluster.announce()
    cluster.settle()
    before = cluster.nodes["n2"].inner.stats(1.0).objects
    writer = Stack(page=64, pools={"full": full()}, store=FaultyStore(cluster.client("n0", ShardConfig("home"))))
    assert writer.put(PROMPT) == Served(0, 0, 256, 257)
    for n in range(8):
        writer.put(range(1000 * n, 1000 * n + 513))
    writer.settle()
    assert cluster.nodes["n2"].inner.stats(1.0).objects == before
    assert all(cluster.nodes[node].inner.stats(1.0).objects > 8 for node in ("n0", "n1"))
    assert writer.probe(PROMPT).l3 == 512
    assert stack(cluster, "n1", 1).put(PROMPT) == Served(0, 0, 512, 1)
