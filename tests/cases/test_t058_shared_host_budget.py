"""T058: the ranks of a node share its host memory equally; an explicit size is honoured or refused at start; cgroup limits win."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_ray import machine, sizing
from hicache_ray.actors.setup import capacities, fitted, host_bytes
from hicache_ray.config import Config
from hicache_ray.config_sources import changed
from hicache_ray.errors import ConfigError
from hicache_ray.spec import CacheSpec, Tier
from hicache_ray.testing import Stack, full, state

UNIT = 1 << 20
RANKS = 4


def config(**more: object) -> Config:
    values: dict[str, object] = {"cache.host_reserve": 10 * UNIT, "cache.host_fraction": 0.8, "cache.host_ratio": 1e6, "model.tp": RANKS}
    return changed(Config(), values | {f"cache.{name}": value for name, value in more.items()})


def spec() -> CacheSpec:
    return Stack(pools={"full": full(), "state": state()}, ranks=RANKS, l1=1, l2=1).spec


def test_t058_every_rank_gets_the_same_share_of_what_is_free() -> None:
    assert sizing.host_share(100, 10, 0.8, RANKS) == 18
    made = fitted(config(), spec(), sizing.Memory(100 * UNIT, 100 * UNIT), RANKS)
    assert made.cache.host_size == 18 * UNIT
    slots = capacities(made, spec())  # one answer: every rank and their coordinator compute it from the same configuration
    used = sum(n * spec()[name].page_bytes(64) for (tier, name), n in slots.items() if tier is Tier.HOST)
    largest = max(c.page_bytes(64) for c in spec().components)
    assert 18 * UNIT - 5 * largest < used <= 18 * UNIT


def test_t058_a_ratio_that_asks_for_less_is_left_alone() -> None:
    asked = config(host_ratio=2.0)
    assert fitted(asked, spec(), sizing.Memory(1 << 40, 1 << 40), RANKS) == asked
    assert asked.cache.host_size is None
    assert host_bytes(asked, spec()) > 0


def test_t058_an_explicit_size_is_honoured_or_refused_at_start() -> None:
    node = sizing.Memory(100 * UNIT, 100 * UNIT)
    honoured = config(host_size=22 * UNIT)
    assert fitted(honoured, spec(), node, RANKS) == honoured
    assert host_bytes(honoured, spec()) == 22 * UNIT
    with pytest.raises(ConfigError, match=r"cache.host_size is 23MiB for each of 4 rank\(s\) .* choose at most 23592960 bytes"):
        fitted(config(host_size=23 * UNIT), spec(), node, RANKS)


def test_t058_the_limit_of_a_control_group_wins_over_the_machine(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {1 << 20} kB\nMemAvailable: {1 << 20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (group / "memory.max").write_text(f"{100 * UNIT}\n")
    (group / "memory.current").write_text("0\n")
    assert fitted(config(), spec(), machine.memory(tmp_path), RANKS).cache.host_size == 18 * UNIT
    with pytest.raises(ConfigError, match=r"control group .*cgroup"):
        fitted(config(host_size=23 * UNIT), spec(), machine.memory(tmp_path), RANKS)


def test_t058_a_node_without_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="no more than cache.host_reserve"):
        fitted(config(), spec(), sizing.Memory(100 * UNIT, 9 * UNIT), RANKS)
