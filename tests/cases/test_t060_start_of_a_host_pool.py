"""T060: fresh host memory is touched by threads, and by one where others cannot be started. The ratio is a benchmark: ``bench_host``."""

from __future__ import annotations

import threading

import pytest

from benchmarks import bench_host
from hicache_ray.copies import Mover, choose
from hicache_ray.host_memory import LEAST, touched
from hicache_ray.spec import Tier


@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("size", [1, LEAST - 1, 3 * LEAST + 17])
def test_t060_it_has_its_size_and_is_zero(size: int, threads: int) -> None:
    memory = touched(size, threads)
    assert (memory.nbytes, int(memory.max())) == (size, 0)
    memory[-1] = 7
    assert [t for t in threading.enumerate() if t.name.startswith("hicache-touch")] == []


def test_t060_without_threads_one_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert int(touched(4 * LEAST, 4).max()) == 0


def test_t060_the_host_pools_of_a_rank_are_made_so() -> None:
    with Mover(choose("auto", "cpu", "page_first_direct"), threads=1) as mover:
        buffer = mover.buffer(Tier.HOST, 2 * LEAST)
        assert buffer is not None
        assert buffer.numel() == 2 * LEAST
        assert mover.buffer(Tier.DEVICE, LEAST) is None
        assert mover.buffer(Tier.HOST, 0) is None


def test_t060_the_benchmark_gives_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_host, "WANTED", bench_host.LEAST)
    (row,) = bench_host.run()
    assert row["value"] > 0
    assert row["name"].startswith("first touch")
