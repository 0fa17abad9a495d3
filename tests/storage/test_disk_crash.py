"""kill -9 of a writer at 50 moments of 200 puts: whatever was cut off, what is visible afterwards is whole."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_ray.storage import DiskStore
from tests.storage.disks import batch, get, put, small, sound, visible, write_much

MOMENTS = 50
PATIENCE_S = 60.0


@pytest.fixture
def writers() -> Iterator[subprocess.Popen[str]]:
    """A process that forks writers: the imports are paid once."""
    process = subprocess.Popen([sys.executable, "-m", "tests.storage.disks"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.communicate(timeout=PATIENCE_S)


def test_kill_9_at_50_moments(memory: Path, writers: subprocess.Popen[str]) -> None:
    assert writers.stdin is not None
    assert writers.stdout is not None
    (memory / "whole").mkdir()
    calls = write_much(memory / "whole", 0)
    chance = random.Random(4)
    told_most = 0
    for moment in sorted(chance.sample(range(8, calls - 40), MOMENTS)):
        directory = memory / str(moment)
        directory.mkdir()
        writers.stdin.write(f"{directory} {moment}\n")
        writers.stdin.flush()
        status, told = map(int, writers.stdout.readline().split())
        assert status == signal.SIGKILL
        store = DiskStore(small(directory))
        try:
            sound(store)
            if told:
                assert set(batch(told - 1)) <= set(visible(store)) | dropped(told), "what a put reported visible is lost"
            put(store, [1000, 1001, 1002, 1003])
            assert get(store, [1000, 1001, 1002, 1003]) == {1000, 1001, 1002, 1003}
            sound(store)
        finally:
            store.close()
        told_most = max(told_most, told)
    assert told_most > 100  # the moments are spread over all of it


def dropped(told: int) -> set[int]:
    """What the writer may have dropped after the last put that it was told of."""
    i = told - 1
    return {batch(i - 3)[0]} if i % 16 == 7 else set()
