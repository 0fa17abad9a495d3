"""T063: the index of a home is restarted and comes back empty, while the nodes that hold the bytes live."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hicache_ray.storage import FaultyStore
from hicache_ray.testing import Served, Stack, full
from tests.storage.cluster import Cluster

PROMPTS = [list(range(1000 * n, 1000 * n + 513)) for n in range(12)]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    opened = Cluster([1 << 24] * 3)
    opened.announce()
    yield opened
    opened.close()
    opened.check()


def stack(cluster: Cluster, node: str) -> Stack:
    return Stack(page=64, pools={"full": full()}, l1=128, l2=128, store=FaultyStore(cluster.client(node)))


def hits(reader: Stack) -> list[int]:
    return [reader.probe(prompt).l3 for prompt in PROMPTS]


@pytest.mark.parametrize("noticed", [False, True])
def test_t063_rebuilt_from_the_nodes(cluster: Cluster, noticed: bool) -> None:
    writer, reader = stack(cluster, "n1"), stack(cluster, "n0")
    for prompt in PROMPTS:
        writer.put(prompt)
    writer.settle()
    assert hits(reader) == [512] * 12
    if noticed:
        cluster.lose("n2")
    cluster.restart("n2")
    assert cluster.nodes["n2"].index.stats().entries == 0

    between = hits(reader)  # misses, not wrong hits: what is said to be there is read
    assert set(between) > {0, 512}
    assert set(between) <= {0, 64, 128, 192, 512}  # the pages before the fourth are in a group of their own
    short = between.index(min(between))
    assert reader.put(PROMPTS[short]) == Served(0, 0, between[short], 513 - between[short])
    assert reader.read(PROMPTS[short], "full") == reader.made(PROMPTS[short], "full")

    cluster.announce()
    assert hits(reader) == [512] * 12
    cluster.settle()
    again = stack(cluster, "n2")
    for prompt in PROMPTS:
        assert again.put(prompt) == Served(0, 0, 512, 1)
        assert again.read(prompt, "full") == again.made(prompt, "full")
