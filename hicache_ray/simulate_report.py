"""Measures with the simulator: what share of requests and of tokens each policy reuses, on families of branching prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from hicache_ray.keys import tagged
from hicache_ray.settings import Eviction, WritePolicy
from hicache_ray.simulate import Tally, World, simulate
from hicache_ray.simulate_cases import cases
from hicache_ray.simulate_rule import longest
from hicache_ray.simulate_settings import USUAL
from hicache_ray.simulate_shards import Shards
from hicache_ray.storage.peers import PLACEMENTS, ShardConfig

#: Models that are measured, and the capacities under which policies differ, in pages per component.
MODELS = ("full", "window", "state", "hybrid", "exact")
L1, L2, L3 = 40, 60, 160
#: Each write policy, and each other order of eviction.
POLICIES = (
    *((policy, Eviction.LRU) for policy in WritePolicy),
    *((WritePolicy.WRITE_THROUGH, eviction) for eviction in Eviction if eviction is not Eviction.LRU),
)
#: Nodes of the store of which one is lost.
NODES = 10


@dataclass(frozen=True)
class Row:
    """One history without faults. ``policy``: of writing, ``eviction``: of what leaves first."""

    case: str
    policy: str
    eviction: str
    tally: Tally


def measure(seed: int, steps: int) -> list[Row]:
    """The same families of prompts under every write policy, and under every order of eviction where all is written through."""
    return list(_rows(seed, steps))


def _rows(seed: int, steps: int) -> Iterator[Row]:
    for name in MODELS:
        for policy, eviction in POLICIES:
            settings = {**USUAL, "write_policy": policy, "eviction": eviction}
            case = replace(cases()[name], settings=settings, faults=0.0, calm=True, l1=(L1, L1), l2=(L2, L2), l3=(L3, L3))
            yield Row(name, policy.value, eviction.value, simulate(seed, steps, case))


@dataclass(frozen=True)
class Loss:
    """What is left of the tokens that prompts could resume at from L3 when one of the nodes is lost, once the others have told each other:
    ``left[i]`` without node ``i``."""

    placement: str
    replicas: int
    left: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.left)


def losses(seed: int, steps: int) -> list[Loss]:
    """For every placement, with one copy and with two."""
    return [loss(seed, steps, ShardConfig(placement, replicas)) for placement in PLACEMENTS for replicas in (1, 2)]


def loss(seed: int, steps: int, config: ShardConfig) -> Loss:
    """One group on each node; what they have asked for is what is looked for."""
    alike: dict[str, Any] = {"faults": 0.0, "calm": True, "settings": USUAL}
    case = replace(cases()["full"], ranks=1, replicas=NODES, nodes=NODES, shards=config, l3=(4000, 4000), **alike)
    world = World(seed, case)
    world.run(steps)
    assert isinstance(world.shelf, Shards)
    before, left = _hits(world, 0), []
    for number, node in enumerate(world.shelf.all):
        world.shelf.take_down(node, keep=True)
        _time_passes(world)
        left.append(_hits(world, (number + 1) % NODES) / before)
        world.shelf.bring_up(node)
        _time_passes(world)
    return Loss(config.placement, config.replicas, tuple(left))


def _time_passes(world: World) -> None:
    """Until everybody has noticed, and the homes have been told."""
    for _ in range(6):
        world.now += 1.0
        world.shelf.beat()  # type: ignore[attr-defined]


def _hits(world: World, reader: int) -> int:
    """Pages at which all prompts together can resume from L3 alone."""
    spec, settings, total = world.case.spec(), world.settings, 0
    for prompt in world.load.prompts:
        found: dict[str, int] = {}
        for c in spec.components:
            either = [world.shelf.lookup(reader, prompt.keys, world.tags[tagged(c.name, kind)], 1.0) for kind in (False, True)]
            found[c.name] = either[0][world.tags[c.name][0]] | either[1][world.tags[tagged(c.name, True)][0]]
        total += longest(spec, settings, len(prompt.values), None, lambda name, page, found=found: bool(found[name] >> page & 1))  # type: ignore[misc]
    return total
