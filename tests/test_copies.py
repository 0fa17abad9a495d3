"""Copies between pools against a copy of byte after byte."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from threading import Event, current_thread, main_thread

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ray import copies
from hicache_ray.copies import BACKENDS, Backend, Copier, Mover, choose, move_with_numpy
from hicache_ray.errors import ConfigError, GroupLost, HiCacheError
from hicache_ray.layout import ORDERS
from hicache_ray.pool import Pool
from hicache_ray.records import slots_array
from hicache_ray.spec import Component, Field, Kind
from tests.layout_twin import copy_naively, kv, state

DIRECT = BACKENDS[0]
NUMPY = Backend("direct", "cpu", tuple(ORDERS), lambda: (move_with_numpy, "numpy"))
COMPONENTS = {
    "kv": kv(2, 5, 5),
    "unlike": kv(2, 5, 3),
    "one field": Component("latent", Kind.FULL, (Field("c", 1, 9, 2),), (0, 1, 2)),
    "state": state(),
    "one head": kv(1, 5, 5),
    "one layer": kv(2, 5, 3, layers=1),
    "odd bytes": kv(3, 1, 7, itemsize=1, dtype="uint8"),
}


@pytest.fixture(scope="module", params=[DIRECT, NUMPY], ids=["compiled", "numpy"])
def mover(request: pytest.FixtureRequest) -> Iterator[Mover]:
    with Mover(request.param, threads=2) as opened:
        yield opened


def filled(component: Component, layout: str, slots: int, seed: int, page_size: int = 4) -> Pool:
    pool = Pool(component, page_size, slots, layout)
    pool.buffer.numpy()[:] = np.random.default_rng(seed).integers(0, 256, pool.buffer.numel(), dtype=np.uint8)
    return pool


def copy_both_ways(source: Pool, target: Pool, mover: Mover, of: list[int], to: list[int]) -> None:
    """The copy and its twin leave the same bytes in all of the target, and the source alone."""
    expected, before = copy_naively(source, target, of, to), source.buffer.clone()
    Copier(source, target, mover).copy(slots_array(of), slots_array(to))
    assert np.array_equal(target.buffer.numpy(), expected)
    assert torch.equal(source.buffer, before)


@pytest.mark.parametrize("name", COMPONENTS)
@pytest.mark.parametrize(("source", "target"), list(itertools.product(ORDERS, ORDERS)))
@pytest.mark.parametrize(
    ("of", "to"),
    [
        ([4], [0]),
        ([6, 0, 3], [2, 5, 1]),  # in no order
        ([0, 1, 2, 3], [1, 2, 3, 4]),  # one run
        ([2, 3, 4, 0, 1], [0, 1, 2, 4, 5]),  # two runs that begin elsewhere on each side
        ([3, 3, 3], [0, 1, 2]),  # one page many times
        ([], []),
    ],
    ids=["one", "unsorted", "run", "two runs", "repeated", "none"],
)
def test_all_pairs_of_layouts(name: str, source: str, target: str, of: list[int], to: list[int], mover: Mover) -> None:
    component = COMPONENTS[name]
    copy_both_ways(filled(component, source, 7, 1), filled(component, target, 6, 2), mover, of, to)


@st.composite
def slot_lists(draw: st.DrawFn, source: int, target: int) -> tuple[list[int], list[int]]:
    to = draw(st.lists(st.integers(0, target - 1), unique=True, max_size=target))
    return draw(st.lists(st.integers(0, source - 1), min_size=len(to), max_size=len(to))), to


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_geometry_and_any_slots(data: st.DataObject, mover: Mover) -> None:
    few = st.integers(1, 3)
    heads = data.draw(few)
    fields = tuple(Field(f"f{i}", heads * data.draw(few), data.draw(few), data.draw(few)) for i in range(data.draw(few)))
    component = Component("any", Kind.FULL, fields, tuple(range(data.draw(few))))
    layouts = st.sampled_from(list(ORDERS))
    slots = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    page = data.draw(few)
    source, target = (filled(component, data.draw(layouts), n, n, page) for n in slots)
    copy_both_ways(source, target, mover, *data.draw(slot_lists(*slots)))


@pytest.mark.parametrize("layout", ORDERS)
def test_within_one_pool(layout: str, mover: Mover) -> None:
    pool = filled(state(), layout, 6, 1)
    of, to = [0, 1, 5], [3, 2, 4]
    expected = copy_naively(pool, pool, of, to)
    Copier(pool, pool, mover).copy(slots_array(of), slots_array(to))
    assert np.array_equal(pool.buffer.numpy(), expected)


@pytest.mark.parametrize(("source", "target"), [("layer_first", "layer_first"), ("layer_first", "page_head"), ("page_first", "page_first")])
def test_pages_that_several_threads_and_pieces_share(source: str, target: str) -> None:
    """Pages of 3 MiB: cut into pieces, joined where they adjoin, and shared by three threads."""
    component = kv(4, 64, 32, layers=4)
    a, b = filled(component, source, 7, 1, 1024), filled(component, target, 6, 2, 1024)
    assert a.page_bytes == 3 << 20
    before = {(name, layer): b.typed(name, layer).clone() for name in "kv" for layer in range(4)}
    of, to = [1, 2, 3, 6], [2, 3, 4, 0]
    with Mover(DIRECT, threads=3) as mover:
        Copier(a, b, mover).copy(slots_array(of), slots_array(to))
    for (name, layer), expected in before.items():
        expected[to] = a.typed(name, layer)[of]
        assert torch.equal(b.typed(name, layer), expected)


@pytest.mark.parametrize("run", [1, 63, 64, 65, 127, 128, 200, 1000])
@pytest.mark.parametrize("stream", [False, True])
def test_a_run_at_any_alignment(run: int, stream: bool) -> None:
    """Streamed stores write whole lines; what lies before, between and behind them stays what it was."""
    move, note = DIRECT.load()
    assert note == ""
    source = np.random.default_rng(run).integers(1, 256, 2048, dtype=np.uint8)
    for of, to in itertools.product((0, 1, 33), (0, 1, 31, 63, 64, 100)):
        target = np.zeros(4096, dtype=np.uint8)
        gap = run + 5
        loops = np.array([(1, 0, 0), (1, 0, 0), (2, 3, gap)], dtype=np.int64)
        one = np.ones(1, dtype=np.int64)
        move(one * (source.ctypes.data + of), one * (target.ctypes.data + to), one * run, loops, stream, 0, 1)
        expected = np.zeros(4096, dtype=np.uint8)
        expected[to : to + run] = source[of : of + run]
        expected[to + gap : to + gap + run] = source[of + 3 : of + 3 + run]
        assert np.array_equal(target, expected)


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    outer=st.integers(1, 5),
    shares=st.integers(1, 6),
)
@settings(deadline=None)
def test_shares_cover_every_unit_once_and_are_equal_up_to_a_unit_at_each_end(sizes: list[int], outer: int, shares: int) -> None:
    size = np.array(sizes, dtype=np.int64)
    loops = np.array([(outer, 0, 0), (1, 0, 0), (1, 0, 0)], dtype=np.int64)
    cuts = copies.Job(size, size, size, loops).cuts(shares)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(sizes) * outer, shares + 1)
    assert cuts == sorted(cuts)
    units = np.repeat(size, outer)
    for begin, end in itertools.pairwise(cuts):
        assert int(units[begin:end].sum()) <= int(units.sum()) / shares + 2 * max(sizes)


def pools(of: Component = COMPONENTS["kv"], to: Component = COMPONENTS["kv"]) -> tuple[Pool, Pool]:
    return filled(of, "layer_first", 7, 1), filled(to, "page_first", 6, 2)


@pytest.mark.parametrize(
    ("of", "to", "sentence"),
    [
        ([0, 1], [2], "a copy needs as many target slots as source slots; it has 1 and 2"),
        ([0, 7], [1, 2], "source slot 7 is outside of the 7 slots of component 'full'"),
        ([0, -1], [1, 2], "source slot -1 is outside of the 7 slots of component 'full'"),
        ([0, 1], [1, 6], "target slot 6 is outside of the 6 slots of component 'full'"),
        ([0, 1, 2], [4, 1, 4], "a copy names a target slot twice: 4; each page needs its own"),
    ],
)
def test_wrong_slots_are_refused_before_a_byte_moves(of: list[int], to: list[int], sentence: str, mover: Mover) -> None:
    a, b = pools()
    before = b.buffer.clone()
    with pytest.raises(HiCacheError) as error:
        Copier(a, b, mover).copy(slots_array(of), slots_array(to))
    assert str(error.value) == sentence
    assert torch.equal(b.buffer, before)


def test_slots_that_are_no_slots(mover: Mover) -> None:
    a, b = pools()
    with pytest.raises(HiCacheError, match=r"the target slots of a copy are one axis of integers; they are float64 of shape \(1,\)"):
        Copier(a, b, mover).copy(slots_array([0]), np.array([0.5]))


def test_one_pool_refuses_a_slot_on_both_sides(mover: Mover) -> None:
    pool, _ = pools()
    with pytest.raises(HiCacheError, match="slot 1 is both source and target of one copy; copy in two steps"):
        Copier(pool, pool, mover).copy(slots_array([0, 1]), slots_array([1, 2]))


@pytest.mark.parametrize("other", ["unlike", "one layer", "one field", "one head"])
def test_pools_of_unlike_geometry_are_refused(other: str, mover: Mover) -> None:
    a, b = pools(to=COMPONENTS[other])
    with pytest.raises(ConfigError, match="both pools need the same layers, tokens, heads and fields"):
        Copier(a, b, mover)


def test_a_pool_on_another_device_is_refused(mover: Mover) -> None:
    a, _ = pools()
    b = Pool(COMPONENTS["kv"], 4, 6, buffer=torch.empty(6 * 480, dtype=torch.uint8, device="meta"))
    with pytest.raises(ConfigError, match='io backend "direct" moves pages on device "cpu"; the pool of component \'full\' is on "meta"'):
        Copier(a, b, mover)


@pytest.mark.parametrize("setting", ["auto", "direct"])
@pytest.mark.parametrize("layout", ORDERS)
def test_what_runs_on_a_cpu(setting: str, layout: str) -> None:
    assert choose(setting, "cpu", layout).name == "direct"


@pytest.mark.parametrize(
    ("setting", "device", "layout", "sentence"),
    [
        (
            "kernel",
            "cpu",
            "page_first",
            'cache.io_backend is "kernel", which cannot run with layout "page_first" on device "cpu"; choose one of auto, direct',
        ),
        ("fast", "cpu", "page_first", 'cache.io_backend is "fast"; choose one of auto, direct'),
        (
            "auto",
            "xpu:0",
            "page_head",
            'no io backend moves pages in layout "page_head" on device "xpu"; choose one of these devices: cpu, cuda',
        ),
        ("auto", "cpu", "paged", 'cache.layout is "paged"; choose one of layer_first, page_first, page_first_direct, page_head'),
    ],
)
def test_what_the_machine_cannot_run_is_refused(setting: str, device: str, layout: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose(setting, device, layout)
    assert str(error.value) == sentence


def table(direct: str = "", kernel: str = "") -> list[Backend]:
    """A device on which the machine lacks this for either backend; long runs are for copy engines."""
    long = tuple(n for n in ORDERS if n in ("layer_first", "page_first_direct"))
    return [
        Backend("direct", "gpu", long, missing=lambda: direct),
        Backend("kernel", "gpu", tuple(ORDERS), missing=lambda: kernel),
        Backend("direct", "gpu", tuple(ORDERS), missing=lambda: direct),
    ]


@pytest.mark.parametrize(("layout", "first", "second"), [("page_head", "kernel", "direct"), ("layer_first", "direct", "kernel")])
def test_auto_falls_back_and_says_so(layout: str, first: str, second: str) -> None:
    picked = choose("auto", "gpu:1", layout, table=table())
    assert (picked.name, picked.note) == (first, "")
    for name in (first, second):
        explicit = choose(name, "gpu:1", layout, table=table())
        assert (explicit.name, explicit.note) == (name, "")
    other = choose("auto", "gpu:1", layout, table=table(**{first: "a screw is missing"}))
    assert other.name == second
    assert other.note == f'cache.io_backend is "auto" and "{second}" was chosen: "{first}" cannot run: a screw is missing'
    with Mover(other, threads=1) as mover:
        assert mover.note == other.note


def test_what_the_machine_lacks_is_said_at_start() -> None:
    with pytest.raises(ConfigError) as error:
        choose("kernel", "gpu", "page_head", table=table(kernel="a screw is missing"))
    assert str(error.value) == (
        'cache.io_backend is "kernel", which cannot run with layout "page_head" on device "gpu" here (a screw is missing); '
        "choose one of auto, direct"
    )
    with pytest.raises(ConfigError) as error:
        choose("auto", "gpu", "page_head", table=table("a wheel", "a screw"))
    assert str(error.value) == (
        'no io backend can move pages on device "gpu" here: "kernel" cannot run: a screw; "direct" cannot run: a wheel; '
        "add what is missing, or choose another device"
    )


def test_a_closed_mover_refuses_copies() -> None:
    a, b = pools()
    mover = Mover(DIRECT)
    mover.close()
    mover.close()
    with pytest.raises(HiCacheError, match="the mover is closed; open a new one before copying"):
        Copier(a, b, mover).copy(slots_array([0]), slots_array([0]))
    with pytest.raises(ConfigError, match="copies need at least 1 thread; 0 were asked for"):
        Mover(DIRECT, threads=0)


def other_thread(act: Callable[[], None]) -> Backend:
    """Copies nothing: the caller's thread waits until another one has begun, which then does ``act``."""
    begun = Event()

    def move(*_: object) -> None:
        if current_thread() is main_thread():
            assert begun.wait(60)
        else:
            begun.set()
            act()

    return Backend("direct", "cpu", tuple(ORDERS), lambda: (move, ""))


def copy_three_mib(mover: Mover) -> None:
    component = kv(4, 64, 32, layers=4)
    Copier(Pool(component, 1024, 2), Pool(component, 1024, 2), mover).copy(slots_array([0]), slots_array([1]))


def test_an_error_of_any_thread_reaches_the_caller() -> None:
    def fail() -> None:
        raise HiCacheError("the other thread failed")

    with Mover(other_thread(fail)) as mover, pytest.raises(HiCacheError, match="the other thread failed"):
        copy_three_mib(mover)


def test_a_thread_that_hangs_ends_in_a_sentence() -> None:
    released = Event()

    def hang() -> None:
        assert released.wait(60)

    with Mover(other_thread(hang), timeout_s=0.01) as mover:
        with pytest.raises(
            GroupLost, match=r"a copy did not finish within 0.01 s; its slots cannot be used before the mover is closed"
        ):
            copy_three_mib(mover)
        released.set()


def test_without_numba_copies_run_in_numpy_and_say_so() -> None:
    """In a process of its own, where numba cannot be imported."""
    script = (
        "import sys; sys.modules['numba'] = None\n"
        "from hicache_ray.copies import Mover, choose, move_with_numpy\n"
        "mover = Mover(choose('auto', 'cpu', 'page_first'))\n"
        "assert mover._move is move_with_numpy\n"
        "print(mover.note)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("copies run in numpy, at a fraction of their speed, because numba does not work here: ")


def test_numba_is_loaded_when_a_mover_opens_and_not_before() -> None:
    script = (
        "import sys, hicache_ray.copies as c\n"
        "assert 'numba' not in sys.modules\n"
        "mover = c.Mover(c.BACKENDS[0])\n"
        "assert 'numba' in sys.modules and not mover.note\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=120, check=True)


def test_the_numpy_fallback_takes_pages_of_many_parts() -> None:
    """One page of 2 MiB is cut into more parts than it has units: some parts are empty."""
    component = Component("full", Kind.FULL, (Field("k", 8, 128, 4, "float32"), Field("v", 8, 128, 4, "float32")), (0, 1, 2, 3))
    source, target = Pool(component, 64, 4, "layer_first"), Pool(component, 64, 4, "page_first_direct")
    assert source.page_bytes == 2 << 20
    source.buffer.numpy()[:] = np.random.default_rng(3).integers(0, 256, source.buffer.numel(), dtype=np.uint8)
    with Mover(Backend("direct", "cpu", tuple(ORDERS), lambda: (move_with_numpy, "")), threads=2) as mover:
        Copier(source, target, mover).copy(slots_array([1]), slots_array([2]))
    for field in ("k", "v"):
        assert bool((source.rows(field)[1] == target.rows(field)[2]).all())
        assert int(target.rows(field)[0].sum()) == 0
