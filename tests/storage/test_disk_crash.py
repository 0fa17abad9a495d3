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
from tests.storage.disks import batch, get, put, small, sound, visible

MOMENTS = 50
PATIENCE_S = 60.0


@pytest.fixture
def writers() -> Iterator[subprocess.Popen[str]]:
    """A process that forks writers: the imports are paid once."""
    process = subprocess.Popen([sys.executable, "-m", "tests.storage.disks"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.communicate(timeout=PATIENCE_S)


def test_kill_9_at_50_moments(memory: Path, writers: subprocess.Popen[str]) -> None:
    """Each writer goes on where the one before was killed, so what one crash leaves must also bear the next."""
    assert writers.stdin is not None
    assert writers.stdout is not None
    chance = random.Random(4)
    puts = 0
    for _ in range(MOMENTS):
        writers.stdin.write(f"{memory} {puts} {chance.randrange(20, 140)}\n")
        writers.stdin.flush()
        status, told = map(int, writers.stdout.readline().split())
        assert status == signal.SIGKILL
        store = DiskStore(small(memory))
        try:
            sound(store)
            puts += told
            if told:
                assert set(batch(puts - 1)) <= set(visible(store)) | dropped(puts), "what a put reported visible is lost"
            put(store, [1000, 1001, 1002, 1003])
            assert get(store, [1000, 1001, 1002, 1003]) == {1000, 1001, 1002, 1003}
            sound(store)
        finally:
            store.close()
    assert puts >= 200


def dropped(puts: int) -> set[int]:
    """What the writer may have dropped after the last put that it was told of."""
    i = puts - 1
    return {batch(i - 3)[0]} if i % 16 == 7 else set()
