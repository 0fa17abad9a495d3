"""The CUDA kernel: it compiles, and its arithmetic moves the bytes that the naive twin moves (as plain C++, on a CPU)."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ray.copies import Backend, Copier, Mover
from hicache_ray.copies_fake import copy_runs
from hicache_ray.copies_jobs import Pages
from hicache_ray.copies_kernel import SOURCE, WIDTHS, launches
from hicache_ray.layout import ORDERS
from hicache_ray.pool import Pool
from hicache_ray.records import slots_array
from hicache_ray.spec import Component, Field, Kind
from tests.layout_twin import copy_naively, kv, state
from tests.on_host import OnHost, build, compiler, load

NVCC = shutil.which("nvcc")
CPU = Backend("direct", "cpu", tuple(ORDERS))
COMPONENTS = {
    "kv": kv(2, 5, 5),
    "unlike": kv(2, 5, 3),
    "wide": kv(2, 32, 32),
    "state": state(),
    "odd bytes": kv(3, 1, 7, itemsize=1, dtype="uint8"),
    "one layer": kv(2, 5, 3, layers=1),
}


def filled(component: Component, layout: str, slots: int, seed: int, page_size: int = 4) -> Pool:
    pool = Pool(component, page_size, slots, layout)
    pool.buffer.numpy()[:] = np.random.default_rng(seed).integers(0, 256, pool.buffer.numel(), dtype=np.uint8)
    return pool


def pages_of(source: Pool, target: Pool, of: list[int], to: list[int], layer: int | None = None) -> Pages:
    with Mover(CPU, threads=1) as mover:
        copier = Copier(source, target, mover)
        return copier.pages(*copier.checked(slots_array(of), slots_array(to)), layer)


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed here")
@pytest.mark.parametrize("form", ["-c", "-ptx"])
def test_nvcc_compiles_the_kernel(form: str, tmp_path: Path) -> None:
    (tmp_path / "kernel.cu").write_text(SOURCE)
    command = [str(NVCC), "-arch=sm_80", "-Werror", "all-warnings", form, "-o", str(tmp_path / "out"), str(tmp_path / "kernel.cu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    if form == "-ptx":
        ptx = (tmp_path / "out").read_text()
        for width in WIDTHS:
            assert f".entry hc_copy_{width}(" in ptx
        assert "ld.global.v4.u32" in ptx or "ld.v4.u32" in ptx  # 16 bytes wide indeed


@pytest.mark.parametrize("way", ["kernel", "runs"])
@pytest.mark.parametrize("name", COMPONENTS)
@pytest.mark.parametrize(("source", "target"), list(itertools.product(ORDERS, ORDERS)))
def test_all_pairs_of_layouts(name: str, source: str, target: str, way: str, kernel_on_host: OnHost) -> None:
    """By the kernel's arithmetic, and by the runs that a copy engine is given."""
    a, b = filled(COMPONENTS[name], source, 7, 1), filled(COMPONENTS[name], target, 6, 2)
    for of, to in (([4], [0]), ([6, 0, 3], [2, 5, 1]), ([0, 1, 2, 3], [1, 2, 3, 4]), ([2, 3, 4, 0, 1], [0, 1, 2, 4, 5])):
        expected = copy_naively(a, b, of, to)
        (kernel_on_host if way == "kernel" else copy_runs)(pages_of(a, b, of, to))
        assert np.array_equal(b.buffer.numpy(), expected)


@pytest.mark.parametrize("name", ["kv", "state"])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(ORDERS, ORDERS)))
def test_layer_after_layer_is_the_whole(name: str, source: str, target: str, kernel_on_host: OnHost) -> None:
    a, b = filled(COMPONENTS[name], source, 7, 1), filled(COMPONENTS[name], target, 6, 2)
    of, to = [6, 0, 3], [2, 5, 1]
    expected, before = copy_naively(a, b, of, to), {f.name: b.rows(f.name).clone() for f in b.component.fields}
    for layer in range(a.geometry.layers):
        kernel_on_host(pages_of(a, b, of, to, layer))
        for f in b.component.fields:  # the layers behind are what they were
            assert np.array_equal(b.rows(f.name)[:, layer + 1 :], before[f.name][:, layer + 1 :])
    assert np.array_equal(b.buffer.numpy(), expected)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Pool, Pool, list[int], list[int]]:
    few = st.integers(1, 3)
    heads = draw(few)
    sizes = st.sampled_from([1, 2, 3, 4, 8, 16])
    fields = tuple(Field(f"f{i}", heads * draw(few), draw(sizes), draw(st.sampled_from([1, 2, 4]))) for i in range(draw(few)))
    component = Component("any", Kind.FULL, fields, tuple(range(draw(few))))
    layouts, page = st.sampled_from(list(ORDERS)), draw(few)
    source, target = (filled(component, draw(layouts), n, n, page) for n in (draw(st.integers(1, 5)), draw(st.integers(1, 5))))
    to = draw(st.lists(st.integers(0, target.slots - 1), unique=True, min_size=1, max_size=target.slots))
    of = draw(st.lists(st.integers(0, source.slots - 1), min_size=len(to), max_size=len(to)))
    return source, target, of, to


@given(case=cases())
@settings(max_examples=200, deadline=None)
def test_any_geometry_and_any_slots(case: tuple[Pool, Pool, list[int], list[int]], kernel_on_host: OnHost) -> None:
    source, target, of, to = case
    expected = copy_naively(source, target, of, to)
    pages = pages_of(source, target, of, to)
    assert pages.bytes == len(of) * source.page_bytes == sum(launch.width * launch.total for launch in launches(pages))
    kernel_on_host(pages)
    assert np.array_equal(target.buffer.numpy(), expected)


@pytest.mark.parametrize(
    ("width", "itemsize", "run"), [(64, 2, 16), (20, 2, 8), (6, 2, 4), (5, 2, 2), (5, 1, 1)], ids=["16", "8", "4", "2", "1"]
)
def test_the_widest_unit_that_alignment_allows(width: int, itemsize: int, run: int) -> None:
    """page_head has runs of one row; its length decides, as pools begin at multiples of 16."""
    component = kv(2, width, width, itemsize=itemsize, dtype="uint8" if itemsize == 1 else "int16")
    a, b = Pool(component, 4, 3, "layer_first"), Pool(component, 4, 3, "page_head")
    assert a.buffer.data_ptr() % 16 == b.buffer.data_ptr() % 16 == 0
    assert {launch.width for launch in launches(pages_of(a, b, [0, 2], [1, 0]))} == {run}


@pytest.mark.parametrize(
    "broken",
    [
        ("index % n2; index /= n2", "index % n2; index /= n1"),
        ("to[index] * t_page", "of[index] * t_page"),
        ("unit * (hc_int)sizeof(T)", "unit * (hc_int)sizeof(T) / 32 * 32"),
        ("b * t1", "b * s1"),
    ],
)
def test_a_mistake_in_the_arithmetic_is_seen(broken: tuple[str, str], tmp_path: Path) -> None:
    """Negative control. None of these leaves the two pools."""
    found = compiler()
    if found is None:
        pytest.skip("no C++ compiler here")
    assert broken[0] in SOURCE
    wrong = load(build(found, SOURCE.replace(*broken), tmp_path))
    a, b = filled(COMPONENTS["wide"], "layer_first", 6, 1), filled(COMPONENTS["wide"], "page_head", 6, 2)
    expected = copy_naively(a, b, [5, 0, 3], [2, 4, 1])
    wrong(pages_of(a, b, [5, 0, 3], [2, 4, 1]))
    assert not np.array_equal(b.buffer.numpy(), expected)
