"""Layouts and copy plans against a naive walk over the axes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ray.errors import ConfigError
from hicache_ray.layout import ORDERS, Geometry, Strided, copy_plan, order_of, views
from tests.layout_twin import addresses, kv, state

PAIRS = list(itertools.product(ORDERS, ORDERS))
GEOMETRIES = st.builds(
    lambda layers, tokens, heads, rows: Geometry(layers, tokens, heads, tuple((f"f{i}", n) for i, n in enumerate(rows))),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
)


def runs_of(plan: tuple[Strided, ...], page: tuple[int, int]) -> set[tuple[int, int, int]]:
    """(source, target, bytes) of every run of one page."""
    out = set()
    for step in plan:
        for index in itertools.product(*(range(loop.count) for loop in step.loops)):
            source = step.source + page[0] * step.source_page + sum(i * loop.source for i, loop in zip(index, step.loops, strict=True))
            target = step.target + page[1] * step.target_page + sum(i * loop.target for i, loop in zip(index, step.loops, strict=True))
            out.add((source, target, step.run))
    return out


def byte_pairs(source: dict, target: dict, geometry: Geometry, page: tuple[int, int]) -> list[tuple[int, int]]:
    """(source, target) of every byte of one page, from the naive walk; in the source's order."""
    pairs = []
    for (field, p, *rest), begin in source.items():
        if p == page[0]:
            other = target[(field, page[1], *rest)]
            pairs += [(begin + i, other + i) for i in range(geometry.fields[field][1])]
    return sorted(pairs)


@pytest.mark.parametrize("layout", ORDERS)
@given(geometry=GEOMETRIES, slots=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_views_are_the_walk_over_the_axes(layout: str, geometry: Geometry, slots: int) -> None:
    got = views(ORDERS[layout], geometry, slots)
    assert [(v.field, v.row) for v in got] == list(geometry.fields)
    for (field, page, layer, token, head), address in addresses(layout, geometry, slots).items():
        v = got[field]
        assert v.offset + page * v.page + layer * v.layer + token * v.token + head * v.head == address


@pytest.mark.parametrize(("source", "target"), PAIRS)
@given(geometry=GEOMETRIES, slots=st.tuples(st.integers(2, 4), st.integers(2, 4)))
@settings(max_examples=40, deadline=None)
def test_a_plan_covers_the_page_once_in_the_longest_runs(source: str, target: str, geometry: Geometry, slots: tuple[int, int]) -> None:
    plan = copy_plan(views(ORDERS[source], geometry, slots[0]), views(ORDERS[target], geometry, slots[1]), geometry)
    page = (slots[0] - 1, 1)
    runs = runs_of(plan, page)
    pairs = byte_pairs(addresses(source, geometry, slots[0]), addresses(target, geometry, slots[1]), geometry, page)
    assert sum(n for _, _, n in runs) == geometry.page_bytes == len(pairs)
    assert sorted((s + i, t + i) for s, t, n in runs for i in range(n)) == pairs
    # No run could be longer, except that the last run of a field may happen to adjoin the first of the next on both sides.
    breaks = 1 + sum((t - s) != (y - x) or s + 1 != x for (s, t), (x, y) in itertools.pairwise(pairs))
    assert breaks <= len(runs) <= breaks + len(geometry.fields) - 1


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("component", [kv(2, 5, 5), kv(2, 5, 3), state()], ids=["kv", "unlike", "state"])
def test_a_page_first_layout_moves_to_itself_as_one_run(layout: str, component: object) -> None:
    geometry = Geometry.of(component, 4)  # type: ignore[arg-type]
    v = views(ORDERS[layout], geometry, 6)
    assert copy_plan(v, v, geometry) == (Strided((), geometry.page_bytes, 0, geometry.page_bytes, 0, geometry.page_bytes),)


@pytest.mark.parametrize(
    ("target", "run", "loops"),
    [("layer_first", 80, [3]), ("page_first", 20, [3, 4]), ("page_first_direct", 80, [3]), ("page_head", 10, [3, 4, 2])],
)
def test_runs_from_a_layer_first_pool(target: str, run: int, loops: list[int]) -> None:
    """Layers 3, page 4, heads 2, rows of 10 bytes: loops in the order of the source's bytes."""
    geometry = Geometry.of(kv(2, 5, 5), 4)
    plan = copy_plan(views(ORDERS["layer_first"], geometry, 8), views(ORDERS[target], geometry, 8), geometry)
    assert [(step.run, [loop.count for loop in step.loops]) for step in plan] == [(run, loops)] * 2
    assert all([loop.source for loop in step.loops] == sorted((loop.source for loop in step.loops), reverse=True) for step in plan)


def test_unknown_layout_names_the_legal_ones() -> None:
    with pytest.raises(ConfigError) as error:
        order_of("head_first")
    assert str(error.value) == 'cache.layout is "head_first"; choose one of layer_first, page_first, page_first_direct, page_head'
