"""A store of many nodes against one store in a dict: whatever nodes do, what is served is right, and what is alive is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ray.storage import MemoryStore, bits
from hicache_ray.storage.peers import ShardConfig
from hicache_ray.store import SPACE_BYTES
from tests.storage.cluster import CAPACITY, LONG_S, Cluster
from tests.storage.objects import TAG
from tests.storage.test_sharded import PAGE, name, page

NODES = ["n0", "n1", "n2", "n3"]
IDS = [name(n, n % 5, 1 + n % 2) for n in range(24)]
some_ids = st.lists(st.sampled_from(IDS), max_size=8)
steps = st.one_of(
    st.tuples(st.sampled_from(["put", "put", "put", "get", "lookup", "lease", "drop"]), st.sampled_from(NODES), some_ids),
    st.tuples(st.just("clear"), st.sampled_from(NODES), st.integers(1, 2)),
    st.tuples(st.sampled_from(["lose", "heal", "restart", "forget"]), st.sampled_from(NODES), st.none()),
)
configs = st.builds(ShardConfig, placement=st.sampled_from(["writer", "home"]), replicas=st.sampled_from([1, 2]))


class Play:
    """The same calls to both. What is visible must be what the nodes that are alive hold; without losses, what the twin holds."""

    def __init__(self, cluster: Cluster, config: ShardConfig) -> None:
        self.cluster, self.twin = cluster, MemoryStore(CAPACITY)
        self.clients = {node: cluster.client(node, config) for node in NODES}
        self.intact = True  # no node was ever without its bytes

    def alive(self) -> set[bytes]:
        return {id for node in self.cluster.nodes.values() if node.up for id in node.inner.scan()}

    def step(self, act: str, node: str, what: object) -> None:
        if act in ("lose", "heal", "restart", "forget"):
            self.change(act, node)
        elif self.cluster.nodes[node].up:
            self.call(act, node, what)
        self.compare()

    def change(self, act: str, node: str) -> None:
        up = self.cluster.nodes[node].up
        if act == "lose" and up and sum(n.up for n in self.cluster.nodes.values()) > 1:
            self.cluster.lose(node)
            self.intact = False
        elif act == "heal" and not up:
            self.cluster.heal(node)
        elif act == "restart":
            self.cluster.restart(node)
        elif act == "forget" and up:
            self.cluster.restart(node, keep_bytes=False)
            self.intact = False
        self.cluster.announce()
        self.cluster.settle()

    def call(self, act: str, node: str, what: object) -> None:
        store = self.clients[node]
        if act == "clear":
            if all(n.up for n in self.cluster.nodes.values()):
                prefix = bytes([what]) * SPACE_BYTES  # type: ignore[list-item]
                store.clear(LONG_S, prefix)
                self.twin.clear(LONG_S, prefix)
            return
        ids: list[bytes] = what  # type: ignore[assignment]
        known = sum(1 << i for i, id in enumerate(ids) if id in self.alive())
        if act == "put":
            assert store.put(ids, [page(id) for id in ids], LONG_S) == (1 << len(ids)) - 1
            self.twin.put(ids, [page(id) for id in ids], LONG_S)
        elif act == "get":
            targets = [bytearray(PAGE) for _ in ids]
            assert store.get(ids, targets, LONG_S) == known
            assert all(bytes(targets[i]) == page(ids[i]) for i in bits.each(known))
        elif act == "lookup":
            assert store.lookup([id[:48] for id in ids], [TAG], LONG_S)[TAG].hit == known
        elif act == "lease":
            with store.lease(ids, LONG_S) as lent:
                assert lent.valid() == known
                assert all(bytes(lent.views[i]) == page(ids[i]) for i in bits.each(known))  # type: ignore[arg-type]
        elif act == "drop" and all(n.up for n in self.cluster.nodes.values()):
            first = [id not in ids[:i] for i, id in enumerate(ids)]
            assert store.drop(ids, LONG_S) == sum(1 << i for i in bits.each(known) if first[i])
            self.twin.drop(ids, LONG_S)

    def compare(self) -> None:
        here = next(node.name for node in self.cluster.nodes.values() if node.up)
        answer = self.clients[here].lookup([id[:48] for id in IDS], [TAG], LONG_S)[TAG]
        found = {IDS[i] for i in bits.each(answer.hit)}
        assert found == self.alive()
        assert answer.retry == 0
        assert set(self.clients[here].scan(timeout_s=LONG_S)) == found
        wanted = set(self.twin.scan())
        assert found == wanted if self.intact else found <= wanted
        self.cluster.check()


def runs(config: ShardConfig) -> Iterator[Play]:
    cluster = Cluster([CAPACITY] * len(NODES), ["a", "a", "b", "b"])
    cluster.announce()
    with closing(cluster):
        yield Play(cluster, config)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(configs, st.lists(steps, max_size=25))
def test_a_sharded_store_does_what_one_store_does(config: ShardConfig, play: list[tuple[str, str, object]]) -> None:
    for run in runs(config):
        for act, node, what in play:
            run.step(act, node, what)
