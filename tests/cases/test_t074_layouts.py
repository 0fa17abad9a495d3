"""T074: all layouts agree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hicache_ray.copies import BACKENDS, Copier, Mover
from hicache_ray.layout import ORDERS
from hicache_ray.pool import Pool
from hicache_ray.records import slots_array
from hicache_ray.spec import Component, Field, Kind

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
def test_all_layouts_agree(source_layout: str, target_layout: str, backend: object) -> None:
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
def test_the_page_object_is_480_contiguous_bytes(layout: str) -> None:
    """K and V of one page together, in whatever order: the numbers of page 3 and of no other."""
    pool = filled(layout, SOURCE_SLOTS, 1)
    assert pool.page_bytes == 480
    stored = pool.buffer[3 * 480 : 4 * 480].clone().view(torch.int16).numpy()
    values = numbers(SOURCE_SLOTS, 1)
    assert sorted(stored.tolist()) == sorted([*values["k"][3].ravel().tolist(), *values["v"][3].ravel().tolist()])


def test_the_stored_object_is_k_then_v_then_layers_then_tokens() -> None:
    pool = filled("page_first_direct", SOURCE_SLOTS, 1)
    values = numbers(SOURCE_SLOTS, 1)
    assert np.frombuffer(pool.page(3), dtype=np.int16).tolist() == [*values["k"][3].ravel().tolist(), *values["v"][3].ravel().tolist()]
