"""Pools: buffers that fit, views that write through, pages that are objects."""

from __future__ import annotations

import pytest
import torch

from hicache_ray.errors import ConfigError, HiCacheError, Inconsistent
from hicache_ray.layout import ORDERS
from hicache_ray.pool import Pool
from hicache_ray.spec import Component, Field, Kind
from tests.layout_twin import addresses, kv, state


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(959, dtype=torch.uint8),
        torch.zeros(960, dtype=torch.int8),
        torch.zeros(2, 480, dtype=torch.uint8),
        torch.zeros(1920, dtype=torch.uint8)[::2],
    ],
    ids=["short", "dtype", "axes", "gaps"],
)
def test_a_buffer_that_does_not_fit_is_refused(buffer: torch.Tensor) -> None:
    with pytest.raises(ConfigError) as error:
        Pool(kv(2, 5, 5), 4, 2, buffer=buffer)
    wanted = "the pool of component 'full' needs a buffer of 960 contiguous bytes (2 slots of 480); it was given "
    assert str(error.value) == f"{wanted}{buffer.dtype} of shape {tuple(buffer.shape)} and stride {buffer.stride()}"


@pytest.mark.parametrize("layout", ORDERS)
def test_typed_views_write_through(layout: str) -> None:
    pool = Pool(kv(2, 5, 3), 4, 6, layout)
    pool.check()
    at = addresses(layout, pool.geometry, 6)
    for field, width in ((0, 5), (1, 3)):
        name = "kv"[field]
        for layer in range(3):
            view = pool.typed(name, layer)
            assert (view.shape, view.dtype) == ((6, 4, 2, width), torch.int16)
            view[5, 2, 1] = torch.arange(width, dtype=torch.int16) + 100 * layer
        for layer in range(3):
            begin = at[field, 5, layer, 2, 1]
            assert pool.buffer[begin : begin + 2 * width].view(torch.int16).tolist() == [100 * layer + i for i in range(width)]
            assert torch.equal(pool.rows(name)[5, layer, 2, 1], pool.buffer[begin : begin + 2 * width])
    assert int(torch.count_nonzero(pool.buffer.view(torch.int16))) == 3 * (5 + 3) - 2  # 0 is among the values of layer 0, once per field


@pytest.mark.parametrize("layout", ORDERS)
def test_a_snapshot_has_no_token_axis_and_keeps_all_heads(layout: str) -> None:
    pool = Pool(state(), 64, 5, layout)
    assert pool.geometry.tokens == 1
    assert pool.typed("conv", 1).shape == (5, 1, 6, 4)
    recurrent = pool.typed("recurrent", 1)
    assert (recurrent.shape, recurrent.dtype) == ((5, 4, 2, 3), torch.int32)
    recurrent[3] = torch.arange(24, dtype=torch.int32).reshape(4, 2, 3)
    begin = addresses(layout, pool.geometry, 5)[1, 3, 1, 0, 0]
    assert pool.buffer[begin : begin + 96].clone().view(torch.int32).tolist() == list(range(24))


def test_heads_beyond_the_common_axis_are_one_axis_where_they_adjoin() -> None:
    """2 and 4 heads have a head axis of 2; page_head puts other fields between the halves of the second."""
    fields = (Field("a", 2, 3, 2, "int16"), Field("b", 4, 3, 2, "int16"))
    component = Component("state", Kind.STATE, fields)
    pool = Pool(component, 64, 2, "layer_first")
    pool.typed("b", 0)[1] = torch.arange(12, dtype=torch.int16).reshape(4, 3)
    begin = addresses("layer_first", pool.geometry, 2)[1, 1, 0, 0, 0]
    assert pool.buffer[begin : begin + 24].clone().view(torch.int16).tolist() == list(range(12))
    with pytest.raises(ConfigError, match="field 'b' has 4 heads and the head axis 2, which layout 'page_head' tears apart"):
        Pool(component, 64, 2, "page_head").typed("b", 0)


def test_a_buffer_inside_of_a_larger_one() -> None:
    """Views and pages of a pool start where its buffer starts, not where the memory around it does."""
    around = torch.zeros(1000, dtype=torch.uint8)
    pool = Pool(kv(2, 5, 5), 4, 2, buffer=around[20:980])
    pool.typed("k", 0)[0, 0, 0, 0] = 7
    pool.typed("v", 2)[1, 3, 1, 4] = 9
    assert around.nonzero().flatten().tolist() == [20, 978]
    assert pool.page(1)[478] == 9


def test_items_that_start_at_odd_bytes_have_no_typed_view() -> None:
    component = Component("full", Kind.FULL, (Field("a", 1, 3, 1, "uint8"), Field("b", 1, 2, 4, "float32")))
    with pytest.raises(
        ConfigError, match="field 'b' of component 'full' does not start at multiples of its 4 bytes in the layout 'page_first'"
    ):
        Pool(component, 1, 2, "page_first").typed("b", 0)


def test_unknown_field_names_the_fields() -> None:
    with pytest.raises(ConfigError, match="component 'full' has no field 'q'; it has k, v"):
        Pool(kv(2, 5, 5), 4, 2).typed("q", 0)


@pytest.mark.parametrize(
    ("layout", "component", "expected"),
    [
        ("page_first_direct", kv(2, 5, 5), True),
        ("page_first", kv(2, 5, 5), False),
        ("page_head", kv(2, 5, 5), False),
        ("layer_first", kv(2, 5, 5), False),
        ("page_first", kv(2, 5, 5, layers=1), True),  # one layer: tokens first or layers first is the same
        ("page_head", kv(1, 5, 3, layers=1), True),
        ("page_first", state(), True),
        ("layer_first", Component("latent", Kind.FULL, (Field("c", 1, 9, 2, "int16"),)), True),  # one layer of one field
    ],
)
def test_which_pools_hold_pages_as_stored_objects(layout: str, component: Component, expected: bool) -> None:
    pool = Pool(component, 4, 3, layout)
    assert pool.contiguous_pages is expected
    if not expected:
        with pytest.raises(HiCacheError, match=f"not one run of bytes in the layout '{layout}'"):
            pool.page(0)
        return
    twin = addresses("page_first_direct", pool.geometry, 3)
    assert addresses(layout, pool.geometry, 3) == twin


def test_a_page_is_a_window_on_the_buffer() -> None:
    pool = Pool(kv(2, 5, 5), 4, 3)
    page = pool.page(2)
    assert (page.nbytes, page.readonly) == (480, False)
    page[0], page[479] = 3, 4
    assert pool.buffer.nonzero().flatten().tolist() == [960, 1439]
    for slot in (-1, 3):
        with pytest.raises(HiCacheError, match=f"slot {slot} is outside of the 3 slots of component 'full'"):
            pool.page(slot)


def test_check_sees_a_buffer_that_was_replaced() -> None:
    pool = Pool(kv(2, 5, 5), 4, 3)
    pool.check()
    pool.buffer = pool.buffer[:960]
    with pytest.raises(Inconsistent, match="end at 1440 of 960 bytes"):
        pool.check()
