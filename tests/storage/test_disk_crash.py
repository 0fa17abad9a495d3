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
from tests.storage.disks import BLOCK, batch, get, put, small, sound, visible
from tests.storage.objects import TIMEOUT_S

MOMENTS = 50
PATIENCE_S = 60.0


@pytest.fixture
def writers() -> Iterator[subprocess.Popen[str]]:
    """A process that forks writers: the imports are paid once."""
    process = subprocess.Popen([sys.executable, "-m", "tests.storage.disks"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize("room", [6, 24])
def test_kill_9_at_50_moments(memory: Path, writers: subprocess.Popen[str], room: int) -> None:
    """Each writer goes on where the one before was killed, so what one crash leaves must also bear the next. ``room``: for how many
    segments. Where there are few, the put that was cut off may have evicted what the one before it stored; else that must be there."""
    size_bytes, calls = room * 15 * BLOCK, 140 if room == 6 else 250  # where nothing is there already a put takes more of them
    assert writers.stdin is not None
    assert writers.stdout is not None
    chance = random.Random(4)
    puts = 0
    for _ in range(MOMENTS):
        writers.stdin.write(f"{memory} {size_bytes} {puts} {chance.randrange(20, calls)}\n")
        writers.stdin.flush()
        status, told = map(int, writers.stdout.readline().split())
        assert status == signal.SIGKILL
        store = DiskStore(small(memory, size_bytes=size_bytes))
        try:
            sound(store)
            puts += told
            if told and room > 6:
                assert set(batch(puts - 1)) <= set(visible(store)) | dropped(puts), "what a put reported visible is lost"
            put(store, [1000, 1001, 1002, 1003])
            assert get(store, [1000, 1001, 1002, 1003]) == {1000, 1001, 1002, 1003}
            sound(store)
            if room > 6 and len(visible(store)) > 25:  # a quarter of what there is room for: so that nothing is ever evicted
                assert store.stats(TIMEOUT_S).evictions == 0
                store.clear(TIMEOUT_S)
        finally:
            store.close()
    assert puts >= 200


def dropped(puts: int) -> set[int]:
    """What the writer may have dropped after the last put that it was told of."""
    i = puts - 1
    return {batch(i - 3)[0]} if i % 16 == 7 else set()
