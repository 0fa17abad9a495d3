"""What the simulator can be asked to simulate: models by the shapes of their caches, groups, capacities, the share of faults."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hicache_ray.errors import ConfigError
from hicache_ray.settings import Settings, StateSnapshots, WritePolicy
from hicache_ray.simulate_settings import PAGE
from hicache_ray.spec import CacheSpec, Component, Field, Kind, Shard
from hicache_ray.storage.peers import ShardConfig


def component(kind: Kind, reach: int = 0, **more: Any) -> Component:
    """A component of one layer and one small field: its bytes are never made. Options: ``role, lookahead, shard, page_span, ratio, ranks``.
    """
    shard = Shard(more.pop("shard", "heads"))
    return Component("unnamed", kind, (Field("kv", 1, 1),), reach=reach, shard=shard, **more)


@dataclass(frozen=True)
class Case:
    """One kind of history. Capacities are ranges that a seed draws from, in pages per component (snapshots: a page's worth each).

    ``grid``: in pages, 0: none. ``replicas``: cache groups over the one L3, spread over ``nodes``. ``faults``: 1 is the usual rate, 0 a
    world where nothing fails. ``calm``: no cancels, flushes and evictions, so that the cache is measured and not its interruptions.
    ``shards``: L3 is sharded over the nodes, and each has its own view of them; without, it is of one mind.
    ``keeps``: a lower tier has room for everything, so nothing that was cached once may be forgotten. ``settings``: of the group, by
    name; those that are not pinned here are drawn from the seed (:mod:`hicache_ray.simulate_settings`).
    """

    name: str
    pools: Mapping[str, Component]
    ranks: int = 2
    exact: bool = False
    grid: int = 0
    l1: tuple[int, int] = (28, 44)
    l2: tuple[int, int] = (8, 60)
    l3: tuple[int, int] = (40, 2000)
    replicas: int = 1
    nodes: int = 1
    faults: float = 1.0
    calm: bool = False
    keeps: bool = False
    shards: ShardConfig | None = None
    max_requests: int = 6
    prompt_pages: int = 14
    settings: Mapping[str, Any] = field(default_factory=dict)

    def spec(self) -> CacheSpec:
        return CacheSpec("simulated", PAGE, tuple(replace(c, name=name) for name, c in self.pools.items()), self.ranks)

    def core(self, settings: Mapping[str, Any]) -> Settings:
        """The group's settings; ``settings``: all that are drawn or pinned."""
        return Settings(grid=self.grid * PAGE, exact=self.exact, **settings)


def _full(**more: Any) -> Component:
    return component(Kind.FULL, **more)


def _window(tokens: int, **more: Any) -> Component:
    return component(Kind.WINDOW, tokens, **more)


def _chunked(tokens: int) -> Component:
    return component(Kind.CHUNKED, tokens)


def _state(every: int, **more: Any) -> Component:
    return component(Kind.STATE, every, **more)


def cases() -> Mapping[str, Case]:
    """All cases with a name of their own; ``random`` is drawn from the seed (:func:`drawn`)."""
    hybrid = {"full": _full(), "swa": _window(20), "state": _state(2 * PAGE)}
    back, selective = {"write_policy": WritePolicy.WRITE_BACK}, {"write_policy": WritePolicy.SELECTIVE}
    patient = {"backup_bytes": 1 << 30, "prefetch_base_s": 2.0}  # L3 takes whatever it is given, in time
    keeping = {"write_policy": WritePolicy.WRITE_THROUGH, "state_snapshots": StateSnapshots.ALL}
    roomy = Case("keeps", hybrid, l2=(2000, 2000), faults=0.0, calm=True, keeps=True, settings=keeping)
    more = {"chunk": _chunked(20), "wide": _full(page_span=2), "draft": _full(role="draft", lookahead=1)}
    first: dict[str, Any] = {"ranks": (0, 1)}
    last: dict[str, Any] = {"ranks": (2,)}
    staged = {"early": _full(**first), "late": _full(**last), "swa": _window(20, **last), "shared": _full(shard="replicated", **first),
              "state": _state(2 * PAGE, **first)}  # fmt: skip
    turn: dict[str, Any] = {"shard": "context"}
    turned = {"full": _full(**turn), "swa": _window(20, **turn), "wide": _full(page_span=2, ranks=(0, 2), **turn),
              "draft": _full(role="draft", lookahead=1, **turn)}  # fmt: skip
    listed = (
        Case("full", {"full": _full()}),
        Case("mla", {"latent": _full(shard="replicated")}, ranks=4),
        Case("window", {"full": _full(), "swa": _window(30)}),
        Case("chunked", {"full": _full(), "chunk": _chunked(28)}),
        Case("state", {"full": _full(), "state": _state(PAGE)}, ranks=1),
        Case("hybrid", hybrid, ranks=2),
        Case("hybrid_back", hybrid, ranks=2, settings=back),
        Case("exact", {"full": _full(), "swa": _window(20), "state": _state(3 * PAGE)}, exact=True, grid=3, ranks=2),
        Case("exact_back", {"full": _full(), "state": _state(2 * PAGE)}, exact=True, grid=2, ranks=3, settings=back),
        Case("loose", {"full": _full(), "swa": _window(20), "state": _state(3 * PAGE)}, grid=3, ranks=2),
        Case("draft", {"full": _full(), "draft": _full(role="draft", lookahead=1)}),
        Case("wide", {"full": _full(), "wide": _full(page_span=2, ratio=4), "swa": _window(12)}),
        Case("tiny", hybrid, l1=(18, 22), l2=(2, 6), l3=(6, 30)),
        Case("threshold", {"full": _full(), "swa": _window(20)}, settings={"prefetch_threshold": 3 * PAGE}),
        Case("replicas", hybrid, replicas=2, nodes=2),
        Case("four_ranks", {"full": _full(), "mla": _full(shard="replicated"), "state": _state(PAGE)}, ranks=4),
        roomy,
        replace(roomy, name="keeps_back", settings=keeping | back),
        replace(roomy, name="keeps_selective", settings=keeping | selective),
        replace(roomy, name="keeps_tight", l2=(4, 14), l3=(4000, 4000), settings=keeping | back | patient),
        replace(roomy, name="keeps_tight_selective", l2=(4, 14), l3=(4000, 4000), settings=keeping | selective | patient),
        Case("stages", staged, ranks=3),
        Case("in_turn", turned, ranks=3),
        Case("shards", {"full": _full()}, replicas=3, nodes=4, shards=ShardConfig()),
        Case("shards_twice", {"full": _full(), "swa": _window(20)}, replicas=2, nodes=3, shards=ShardConfig("home", 2)),
        Case("everything", {**hybrid, **more}, ranks=3),
    )
    return {case.name: case for case in listed}


def drawn(rng: random.Random) -> Case:
    """A case that a seed makes up."""
    exact = rng.random() < 0.35
    grid = rng.randint(1, 4) if exact or rng.random() < 0.4 else 0
    pools: dict[str, Component] = {"full": _full()}
    if rng.random() < 0.55:
        pools["swa"] = _window(rng.randint(1, 60))
    if rng.random() < 0.3:
        pools["chunk"] = _chunked(rng.randint(1, 60))
    if rng.random() < 0.5:
        pools["state"] = _state((grid or 1) * PAGE * rng.randint(0, 3))
    if rng.random() < 0.2:
        pools["wide"] = _full(page_span=rng.choice([2, 3]))
    if rng.random() < 0.2:
        pools["shared"] = _full(shard="replicated")
    if rng.random() < 0.25:
        pools["draft"] = component(rng.choice([Kind.FULL, Kind.WINDOW]), 24, role="draft", lookahead=rng.randint(0, 2))
    ranks = rng.randint(1, 4)
    pools = {name: _placed(rng, c, ranks) for name, c in pools.items()}
    l1, l2, l3 = rng.randint(30, 60), rng.randint(1, 80), rng.choice([10, 100, 2000])
    replicas = rng.choice([1, 1, 1, 2, 3])
    shards = ShardConfig(rng.choice(["writer", "home"]), rng.choice([1, 2])) if rng.random() < 0.2 else None
    nodes = rng.randint(1, replicas) if shards is None else rng.randint(replicas, 5)
    return Case(
        "random", pools, ranks, exact, grid, (l1, l1), (l2, l2), (l3, l3), replicas, nodes, rng.choice([0.0, 0.5, 1.0, 1.0, 3.0]),
        max_requests=rng.randint(2, 10), prompt_pages=rng.randint(3, 16), shards=shards,
    )  # fmt: skip


def _placed(rng: random.Random, c: Component, ranks: int) -> Component:
    """On some of the ranks, as a pipeline stage holds its layers; each page on one of them, in turn (context parallelism)."""
    if rng.random() < 0.25:
        c = replace(c, ranks=tuple(sorted(rng.sample(range(ranks), rng.randint(1, ranks)))))
    return replace(c, shard=Shard.CONTEXT) if not c.is_state and rng.random() < 0.15 else c


def case_of(name: str, rng: random.Random) -> Case:
    """The case called ``name``. Raises :class:`ConfigError` where there is none."""
    listed = cases()
    if name == "random":
        return drawn(rng)
    if name not in listed:
        raise ConfigError(f'there is no case "{name}"; choose one of {", ".join(["random", *listed])}')
    return listed[name]
