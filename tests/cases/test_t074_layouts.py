"""T074: all layouts agree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hicache_ray.copies import BACKENDS, Copier, Mover
from hicache_ray.copies_fake import FakeDevice, copy_runs
from hicache_ray.copies_queues import Leg
from hicache_ray.layout import ORDERS
from hicache_ray.pool import Pool
from hicache_ray.records import slots_array
from hicache_ray.spec import Component, Field, Kind, Tier
from hicache_ray.testing_queues import fake_mover
from tests.layout_twin import copy_naively, kv, state
from tests.on_host import OnHost

LAYERS, PAGE, HEADS, DIM = 3, 4, 2, 5
SOURCE_SLOTS, TARGET_SLOTS = 7, 6
# Part of the pages, in no order.
OF, TO = [5, 0, 6, 2], [1, 4, 0, 3]


def component() -> Component:
    fields = tuple(Field(name, HEADS, DIM, 2, "int16") for name in "kv")
    return Component("full", Kind.FULL, fields, tuple(range(LAYERS)))


def numbers(slots: int, first: int) -> dict[str, np.ndarray]:
    """Each element a distinct number: [slots, layers, tokens, heads, dim] per field."""
    shape = (2, slots, LAYERS, PAGE, HEADS, DIM)
    both = np.arange(first, first + np.prod(shape), dtype=np.int16).reshape(shape)
    return {"k": both[0], "v": both[1]}


def filled(layout: str, slots: int, first: int) -> Pool:
    pool = Pool(component(), PAGE, slots, layout)
    for name, values in numbers(slots, first).items():
        for layer in range(LAYERS):
            pool.typed(name, layer).copy_(torch.from_numpy(values[:, layer]))
    return pool


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.device == "cpu"], ids=lambda b: b.name)
@pytest.mark.parametrize(("source_layout", "target_layout"), list(itertools.product(ORDERS, ORDERS)))
def test_t074_all_layouts_agree(source_layout: str, target_layout: str, backend: object) -> None:
    source, target = filled(source_layout, SOURCE_SLOTS, 1), filled(target_layout, TARGET_SLOTS, 10_000)
    with Mover(backend) as mover:  # type: ignore[arg-type]
        Copier(source, target, mover).copy(slots_array(OF), slots_array(TO))
    sent, before = numbers(SOURCE_SLOTS, 1), numbers(TARGET_SLOTS, 10_000)
    for name in "kv":
        expected = before[name].copy()
        expected[TO] = sent[name][OF]
        for layer in range(LAYERS):
            assert np.array_equal(target.typed(name, layer).numpy(), expected[:, layer])
            assert np.array_equal(source.typed(name, layer).numpy(), sent[name][:, layer])


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head"])
def test_t074_the_page_object_is_480_contiguous_bytes(layout: str) -> None:
    """K and V of one page together, in whatever order: the numbers of page 3 and of no other."""
    pool = filled(layout, SOURCE_SLOTS, 1)
    assert pool.page_bytes == 480
    stored = pool.buffer[3 * 480 : 4 * 480].clone().view(torch.int16).numpy()
    values = numbers(SOURCE_SLOTS, 1)
    assert sorted(stored.tolist()) == sorted([*values["k"][3].ravel().tolist(), *values["v"][3].ravel().tolist()])


def test_t074_the_stored_object_is_k_then_v_then_layers_then_tokens() -> None:
    pool = filled("page_first_direct", SOURCE_SLOTS, 1)
    values = numbers(SOURCE_SLOTS, 1)
    assert np.frombuffer(pool.page(3), dtype=np.int16).tolist() == [*values["k"][3].ravel().tolist(), *values["v"][3].ravel().tolist()]


#: Every kind of field: unlike widths, one-byte and packed items with scales, states of several item sizes.
KINDS = {
    "unlike": (kv(2, 5, 3), 4),
    "wide rows": (kv(2, 32, 32), 4),
    "fp8": (Component("c", Kind.FULL, (Field("k", 2, 16, 1, "float8_e4m3fn"), Field("v", 2, 7, 1, "float8_e4m3fn")), (0, 1)), 4),
    "4 bit and scales": (Component("c", Kind.FULL, (Field("s", 2, 1, 4, "float32"), Field("k", 2, 8, 1, "uint8")), (0, 1, 2)), 4),
    "entries": (Component("c", Kind.FULL, (Field("entry", 1, 6),), (0, 2), ratio=2, page_span=2), 4),
    "one layer of one field": (Component("c", Kind.WINDOW, (Field("latent", 1, 9),), (3,), 7), 4),
    "state": (state(), 64),
}


@pytest.mark.parametrize("backend", ["cpu", "direct", "kernel"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("source_layout", "target_layout"), list(itertools.product(ORDERS, ORDERS)))
def test_t074_all_layouts_agree_for_every_kind_of_field(
    source_layout: str, target_layout: str, kind: str, backend: str, kernel_on_host: OnHost
) -> None:
    """Against the walk over the axes, byte for byte in all of the target; direct and kernel on a device with queues, whole and by layer."""
    component, page = KINDS[kind]
    for by_layer in (False, True):
        source, target = Pool(component, page, SOURCE_SLOTS, source_layout), Pool(component, page, TARGET_SLOTS, target_layout)
        for seed, pool in enumerate((source, target)):
            pool.buffer.numpy()[:] = np.random.default_rng(seed).integers(0, 256, pool.buffer.numel(), dtype=np.uint8)
        before, expected = source.buffer.clone(), copy_naively(source, target, OF, TO)
        if backend == "cpu":
            with Mover(BACKENDS[0], threads=1) as mover:
                Copier(source, target, mover).copy(slots_array(OF), slots_array(TO))
        else:
            mover = fake_mover(FakeDevice(lambda *_: 0.001, kernel_on_host if backend == "kernel" else copy_runs), backend)
            tiers = (Tier.HOST, Tier.DEVICE) if by_layer else (Tier.DEVICE, Tier.HOST)
            copier, order = Copier(source, target, mover), mover.order
            assert order is not None
            for tier, pool in zip(tiers, (source, target), strict=True):
                order.attach((tier, component.name), pool.slots, pool.geometry.layers)
            order.copy(*tiers, [Leg(component, copier, *copier.checked(slots_array(OF), slots_array(TO)))])
            order.drain()
        assert np.array_equal(target.buffer.numpy(), expected)
        assert torch.equal(source.buffer, before)
