"""T007: all arrays of a state travel together, also extra ones; one that only one side knows of is refused at start."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hicache_ray.copies import Backend, Mover, choose
from hicache_ray.copies_fake import FakeDevice
from hicache_ray.copies_queues import Queue
from hicache_ray.errors import ConfigError
from hicache_ray.executor import Executor, Rank
from hicache_ray.layout import ORDERS
from hicache_ray.pool import Pool
from hicache_ray.records import Move, Outcome, Span, slots_array
from hicache_ray.spec import CacheSpec, Component, Field, Kind, Tier
from hicache_ray.testing_queues import fake_mover
from tests.queues import slow

FIELDS = (
    Field("conv", 1, 24, 2, "int16", (6, 4)),
    Field("temporal", 4, 6, 4, "int32", (2, 3)),
    Field("extra", 2, 3, 8, "float64"),
    Field("flags", 1, 5, 1, "uint8"),
)
LAYERS = (0, 2, 3)
SLOTS = 10


def component(fields: tuple[Field, ...] = FIELDS) -> Component:
    return Component("state", Kind.STATE, fields, LAYERS)


def executor(mover: Mover, layout: str, device: Component, host: Component) -> tuple[Executor, Pool, Pool]:
    pools = {Tier.DEVICE: Pool(device, 64, SLOTS, "layer_first"), Tier.HOST: Pool(host, 64, SLOTS, layout)}
    spec = CacheSpec("test", 64, (device,))
    rank = Rank(0, spec, {tier: {"state": pool} for tier, pool in pools.items()}, {"state": b"t" * 16})
    return Executor(rank, mover, None, lambda _: Outcome(), lambda: 0.0), pools[Tier.DEVICE], pools[Tier.HOST]


def move(executor: Executor, source: Tier, target: Tier, of: int, to: int) -> None:
    span = Span("state", slots_array([of]), slots_array([to]))
    assert executor.execute(Move(0, "r", source, target, (span,))) == Outcome(bits=(1,))


@pytest.mark.parametrize(("layout", "queues"), list(itertools.product(ORDERS, [False, True])))
def test_t007_all_four_arrays_come_back(layout: str, queues: bool) -> None:
    device = FakeDevice(slow(Queue.COPY))
    mover = fake_mover(device) if queues else Mover(choose("auto", "cpu", layout), threads=1)
    run, l1, l2 = executor(mover, layout, component(), component())
    rng = np.random.default_rng(7)
    made = {f.name: rng.integers(0, 255, tuple(l1.rows(f.name)[3].shape), dtype=np.uint8) for f in FIELDS}  # no byte is 0xFF
    for name, values in made.items():
        l1.rows(name)[3].numpy()[...] = values
    move(run, Tier.DEVICE, Tier.HOST, 3, 5)
    for f in FIELDS:
        l1.rows(f.name)[9].fill_(0xFF)
    move(run, Tier.HOST, Tier.DEVICE, 5, 9)
    device.settle()
    for name, values in made.items():
        assert np.array_equal(l1.rows(name)[9].numpy(), values), name
        assert np.array_equal(l2.rows(name)[5].numpy(), values), name
        assert not l1.rows(name)[[0, 1, 2, 4, 5, 6, 7, 8]].any()  # nor has anything else moved


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize("layout", ORDERS)
def test_t007_an_extra_that_the_host_pool_does_not_know_is_refused_at_start(layout: str, queues: bool) -> None:
    mover = fake_mover(FakeDevice(slow(Queue.COPY))) if queues else Mover(Backend("direct", "cpu", tuple(ORDERS)), threads=1)
    for known in (FIELDS[:3], (*FIELDS[:3], replace(FIELDS[3], width=6)), (*FIELDS[:3], replace(FIELDS[3], name="marks"))):
        with pytest.raises(ConfigError, match="pages of component 'state' .* do not fit into those of 'state' .*; both pools need"):
            executor(mover, layout, component(), component(known))
