"""Copies with a checksum: the compiled loop against memmove and the xxhash library, slices, deadlines, threads."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hicache_ray.errors import ConfigError, StoreError
from hicache_ray.storage import ArenaService, ClientConfig, copying, kernel, movers
from hicache_ray.storage.addresses import place_of, views_of
from hicache_ray.storage.copying import Copier, _slices
from hicache_ray.storage.descriptors import Sums
from hicache_ray.storage.loading import KERNELS
from hicache_ray.storage.movers import Batch, KernelMover, Mover, Movers, PlainMover
from hicache_ray.storage.segment import Array
from tests.storage.conftest import PAGES
from tests.storage.objects import PAGE, page

PATIENCE_S = 60.0
EDGE = 192  # bytes on both sides of a piece that must stay as they are
#: Where xxh3 changes its ways, and where stripes and blocks end.
LENGTHS = [0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 256, 257, 1023, 1024, 1025, 1088, 1089, 2048, 2049, 3072, 4097]

fast = settings(derandomize=True, deadline=None, max_examples=150)
lengths = st.one_of(st.sampled_from(LENGTHS), st.integers(0, 5000))
pieces = st.lists(st.tuples(lengths, st.integers(0, 130), st.integers(0, 130)), min_size=1, max_size=6)


class Pieces:
    """Sources and targets in one buffer each, ``EDGE`` bytes and more apart, at the alignments asked for."""

    def __init__(self, shapes: Sequence[tuple[int, int, int]], stream: bool = False, of_source: bool = False) -> None:
        self.starts, total = [], 0
        for size, source, target in shapes:
            self.starts.append((total + EDGE + source, total + EDGE + target))
            total += size + 2 * EDGE + 130
        self.sizes = [size for size, _, _ in shapes]
        self.source = page(total, total)
        self.target = _aligned(total)
        bases = np.array([self.source.ctypes.data, self.target.ctypes.data])
        of, to = (np.array(self.starts, np.int64) + bases).T.copy()
        self.batch = Batch(of, to, np.array(self.sizes, np.int64), of_source, stream)
        self.checksums = [xxhash.xxh3_64_intdigest(data) for data in self.sources()]

    def sources(self) -> list[bytes]:
        return [self.source[s : s + size].tobytes() for (s, _), size in zip(self.starts, self.sizes, strict=True)]

    def wanted(self) -> Array:
        """The targets' buffer after a copy of all."""
        wanted = np.zeros_like(self.target)
        for (_, t), data in zip(self.starts, self.sources(), strict=True):
            wanted[t : t + len(data)] = np.frombuffer(data, np.uint8)
        return wanted


def _aligned(size: int) -> Array:
    buffer = np.zeros(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size]


@pytest.fixture(params=KERNELS)
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copier]:
    """Of two threads, whatever the size of the batch."""
    monkeypatch.setattr(copying, "_ALONE", 0)
    opened = Copier(2, slice_bytes=64 << 10, kernel=request.param)
    assert opened.warm_up(PATIENCE_S) == (request.param == "auto")
    yield opened
    opened.close()


def never() -> bool:
    return False


@pytest.mark.parametrize("make", [PlainMover, lambda: KernelMover(kernel)], ids=["memmove", "kernel"])
@given(pieces, st.booleans(), st.booleans(), st.integers(1, 3000))
@example([(size, 1, 0) for size in LENGTHS], True, False, 1 << 20)
@example([(size, 0, 16) for size in LENGTHS], True, True, 1)
@example([(size, 7, 9) for size in LENGTHS], True, False, 1024)
@example([(size, 0, 0) for size in LENGTHS], False, True, 1500)
@fast
def test_every_byte_moves_and_counts(
    make: Callable[[], Mover], shapes: list[tuple[int, int, int]], stream: bool, of_source: bool, budget: int
) -> None:
    """Any lengths, at any addresses, in any number of goes."""
    some, mover, at = Pieces(shapes, stream, of_source), make(), np.zeros(2, np.int64)
    checksums, goes = np.zeros(len(shapes), np.uint64), 0
    while at[0] < len(shapes):
        before = at.tolist()
        mover.move(some.batch, checksums, at, len(shapes), budget)
        assert before < at.tolist()  # every go gets further
        goes += 1
        assert goes <= len(shapes) + sum(some.sizes)
    assert checksums.tolist() == some.checksums
    assert (some.target == some.wanted()).all()


@given(st.lists(st.integers(0, 10**6), max_size=50), st.integers(1, 10**6))
@fast
def test_slices_take_every_piece_once(sizes: list[int], limit: int) -> None:
    found = _slices(np.array(sizes, np.int64), sum(sizes), limit)
    assert [i for begin, end in found for i in range(begin, end)] == list(range(len(sizes)))
    assert all(sum(sizes[begin:end]) - max(sizes[begin:end], default=0) <= limit for begin, end in found)


@pytest.mark.parametrize("sizes", [[1 << 20], [1 << 20, (1 << 20) + 1], [64 << 10] * 33, [5, 300_000, 0, 240, 241] * 9, []])
def test_threads_share_a_batch(copier: Copier, sizes: list[int]) -> None:
    some = Pieces([(size, 3 * i % 64, 16 * i % 64) for i, size in enumerate(sizes)] or [(0, 0, 0)], stream=True)
    sums = copier.run(some.batch, never)
    assert sums.done.all()
    assert sums.values.tolist() == some.checksums
    assert (some.target == some.wanted()).all()


def test_what_is_given_up_is_not_done(copier: Copier) -> None:
    """Pieces are done or not; of those that are, the bytes are there."""
    some = Pieces([(100_000, 0, 0)] * 20)
    looks = iter(range(10**6))
    sums = copier.run(some.batch, lambda: next(looks) >= 7)
    assert 0 < sums.done.sum() < 20
    _assert_done_is_there(some, sums)
    assert not copier.run(some.batch, lambda: True).done.any()


def test_one_long_piece_is_given_up_within(copier: Copier) -> None:
    some = Pieces([(1 << 20, 0, 0)])
    looks = iter(range(10**6))
    assert copier.run(some.batch, lambda: next(looks) >= 2).done.tolist() == [False]
    assert 0 < np.count_nonzero(some.target) < 1 << 19


def _assert_done_is_there(some: Pieces, sums: Sums) -> None:
    wanted = some.wanted()
    for (_, t), size, done, checksum, right in zip(some.starts, some.sizes, sums.done, sums.values.tolist(), some.checksums, strict=True):
        assert not done or (checksum == right and (some.target[t : t + size] == wanted[t : t + size]).all())


def test_a_copy_that_fails_leaves_no_writer_behind(copier: Copier) -> None:
    """When run has returned or raised, targets are the caller's again."""
    some, looks = Pieces([(1 << 20, 0, 0)] * 16), iter(range(10**9))

    def stop() -> bool:
        if next(looks) >= 40:  # whichever thread looks: a helper that fails does not stop the other
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        copier.run(some.batch, stop)
    before = some.target.tobytes()
    other = Pieces([(1 << 20, 0, 0)] * 4)
    assert copier.run(other.batch, never).done.all()  # both threads are free again
    assert some.target.tobytes() == before
    assert not (some.target == some.wanted()).all()


def test_a_closed_copier_still_copies(copier: Copier) -> None:
    some = Pieces([(1 << 20, 0, 0)] * 4)
    copier.close()
    assert copier.run(some.batch, never).values.tolist() == some.checksums


def test_views_are_addresses() -> None:
    buffers: list[Any] = [page(1), bytearray(5), memoryview(bytearray(9))[2:], np.zeros((2, 3), np.int32), b""]
    views = views_of(buffers)
    assert views.sizes.tolist() == [PAGE, 5, 7, 24, 0]
    assert views.addresses[0] == buffers[0].ctypes.data
    assert [place_of(buffer)[:2] for buffer in buffers] == list(zip(views.addresses.tolist(), views.sizes.tolist(), strict=True))
    assert views_of([]).addresses.tolist() == []
    for wrong in (np.zeros((3, 4), np.uint8, order="F"), memoryview(np.zeros((3, 4), np.uint8, order="F")), page(1)[::2], 5, None):
        with pytest.raises(StoreError, match="not one contiguous buffer"):
            views_of([buffers[0], wrong])
        with pytest.raises(StoreError, match="not one contiguous buffer"):
            place_of(wrong)
    with pytest.raises(StoreError, match="read-only"):
        views_of([bytearray(1), b"a"], writable=True)
    with pytest.raises(StoreError, match="read-only"):
        place_of(b"a", writable=True)


def test_copies_do_without_the_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, movers._MODULE, None)  # the import fails
    source = Movers("auto")
    with caplog.at_level(logging.WARNING):
        assert source.warm_up(PATIENCE_S) is False
        source.close()
    assert "cannot be had" in caplog.text
    assert isinstance(source.mover(), PlainMover)
    assert source.warm_up(PATIENCE_S) is False


def test_where_nothing_can_be_kept_it_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    compile = kernel.njit

    def njit(*args: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compile(*args, **options)

    monkeypatch.setattr(kernel, "njit", njit)
    monkeypatch.setattr(kernel, "move", kernel.compiled(kernel._move, kernel.MOVE))
    some, mover, at = Pieces([(5000, 1, 0)]), KernelMover(kernel), np.zeros(2, np.int64)
    checksums = np.zeros(1, np.uint64)
    mover.move(some.batch, checksums, at, 1, 1 << 20)
    assert checksums.tolist() == some.checksums


def test_who_only_looks_up_loads_no_compiler(service: ArenaService) -> None:
    script = f"""
import sys
from hicache_ray.storage import ArenaClient
client = ArenaClient({service.address.socket!r})
client.lookup([bytes(48)], [bytes(16)], 10.0)
assert "numba" not in sys.modules
client.put([bytes(64)], [bytes({PAGE})], 10.0)
assert client.warm_up(60.0) and "numba" in sys.modules
client.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S)
    assert service.stats().objects == 1 <= PAGES


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="kernel is 'fast'; choose from auto, off"):
        ClientConfig(kernel="fast")
    with pytest.raises(ConfigError, match="must be at least 1, not 0"):
        ClientConfig(copy_threads=0)
