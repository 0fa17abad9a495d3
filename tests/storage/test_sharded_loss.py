"""One of ten nodes is lost: how many of the tokens that prompts hit before do they still hit?

Prompts of 256 pages, a third of which go on from an earlier one at a random page. Each is written by a random node: all of its pages (as
every page that enters a host pool is backed up), or only those that no node has. A prompt resumes after its longest run of pages from the
first on that a lookup finds. ``pytest -s`` shows the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from hicache_ray.keys import Namespace, page_keys
from hicache_ray.storage.peers import ShardConfig
from hicache_ray.storage.rendezvous import ranked
from tests.storage.cluster import CAPACITY, LONG_S, Cluster
from tests.storage.objects import TAG

NODES, PAGES, PROMPTS, P = 10, 256, 30, 4
Keys = Sequence[bytes]


def prompts(seed: int) -> list[tuple[bytes, ...]]:
    """The page keys of each prompt."""
    chance = np.random.default_rng(seed)
    made: list[np.ndarray] = []  # type: ignore[type-arg]
    for n in range(PROMPTS):
        tokens = chance.integers(0, 50_000, PAGES * P, np.int32)
        if n % 3 == 2:
            cut = int(chance.integers(1, PAGES)) * P
            tokens[:cut] = made[int(chance.integers(n))][:cut]
        made.append(tokens)
    return [page_keys(Namespace("m", page_size=P), tokens) for tokens in made]


def leading(hit: int) -> int:
    """Length of the run of ones that begins at bit 0."""
    return (~hit & hit + 1).bit_length() - 1


@dataclass
class Run:
    """A cluster that is filled. ``before``: pages that all prompts hit with all nodes there."""

    cluster: Cluster
    paths: list[tuple[bytes, ...]]
    config: ShardConfig

    def fill(self, all_pages: bool, seed: int) -> Run:
        chance = np.random.default_rng(seed + 1)
        self.readers = {node: self.cluster.client(node, self.config) for node in self.cluster.nodes}
        self.cluster.announce()
        for keys in self.paths:
            store = self.readers[f"n{chance.integers(NODES)}"]
            found = store.lookup(keys, [TAG], LONG_S)[TAG].hit
            ids = [key + TAG for i, key in enumerate(keys) if all_pages or not found >> i & 1]
            assert store.put(ids, [id[-24:-16] for id in ids], LONG_S) == (1 << len(ids)) - 1
        self.before = self.hits("n0")
        assert self.before == PROMPTS * PAGES
        return self

    def hits(self, reader: str) -> int:
        return sum(leading(self.readers[reader].lookup(keys, [TAG], LONG_S)[TAG].hit) for keys in self.paths)

    def survival(self) -> list[float]:
        """For each node: the share of the hits that is left without it, once the holders have told the new homes."""
        out = []
        for lost in self.cluster.nodes:
            reader = next(node for node in self.cluster.nodes if node != lost)
            self.cluster.lose(lost)
            self.cluster.announce()
            out.append(self.hits(reader) / self.before)
            self.cluster.heal(lost)
            self.cluster.announce()
        assert self.hits("n0") == self.before
        return out


@pytest.fixture
def runs(nothing_left: None) -> Iterator[list[Cluster]]:
    opened: list[Cluster] = []
    yield opened
    for cluster in opened:
        cluster.close()
        cluster.check()


def filled(runs: list[Cluster], config: ShardConfig, all_pages: bool = True, seed: int = 7) -> Run:
    runs.append(Cluster([CAPACITY] * NODES, [f"rack{n % 5}" for n in range(NODES)]))
    return Run(runs[-1], prompts(seed), config).fill(all_pages, seed)


CASES = [
    # placement, replicas, all pages of a prompt are written, the least mean
    pytest.param("writer", 1, True, 0.85, id="writer"),
    pytest.param("writer", 1, False, 0.80, id="writer, only what is missing"),
    pytest.param("writer", 2, True, 1.0, id="writer, two copies"),
    # The first pages of a path have another home than the rest: two nodes, either of which ends the run.
    pytest.param("home", 1, True, 0.75, id="home"),
    pytest.param("home", 2, True, 1.0, id="home, two copies"),
]


@pytest.mark.parametrize(("placement", "replicas", "all_pages", "least"), CASES)
def test_hit_tokens_survive_the_loss_of_a_node(runs: list[Cluster], placement: str, replicas: int, all_pages: bool, least: float) -> None:
    left = filled(runs, ShardConfig(placement, replicas), all_pages).survival()
    print(f"\n{placement} x{replicas}, all pages {all_pages}: mean {np.mean(left):.3f}, per node {' '.join(f'{x:.3f}' for x in left)}")
    assert np.mean(left) >= least


def test_hashing_every_page_on_its_own_is_the_wrong_way() -> None:
    """Each page on the node of its own key: nearly every prompt loses a page among its first ones, and with it all that follow."""
    nodes = [f"n{n}" for n in range(NODES)]
    paths = prompts(7)
    at = [[ranked(key[-32:], nodes)[0] for key in keys] for keys in paths]
    left = [sum(leading(sum(1 << i for i, n in enumerate(path) if n != lost)) for path in at) / (PROMPTS * PAGES) for lost in nodes]
    print(f"\neach page on its own: mean {np.mean(left):.3f}, per node {' '.join(f'{x:.3f}' for x in left)}")
    assert np.mean(left) < 0.10
