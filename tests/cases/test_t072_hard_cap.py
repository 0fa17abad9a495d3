"""T072: a hard cap: 100 pages, 500 written, readers active."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from hicache_ray.storage import DiskConfig, DiskStore, bits
from hicache_ray.storage.disk_io import DiskOs
from hicache_ray.store import KEY_BYTES, TAG_BYTES

PAGE = 16 << 10
CAP = 100 * PAGE
PATIENCE_S = 30.0


def name(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big") + b"t" * TAG_BYTES


def page(number: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(number).integers(0, 256, PAGE, np.uint8)


class Held(DiskOs):
    """Keeps the cap in sight: every allocation and every write must find room; and holds one read of object 0 until told to go on."""

    def __init__(self) -> None:
        self.store: DiskStore | None = None
        self.reading, self.go = threading.Event(), threading.Event()
        self.most = 0

    def _look(self) -> None:
        if self.store is not None:
            self.most = max(self.most, sum(size for _, size in self.files(self.store.config.directory)))

    def fallocate(self, descriptor: int, size: int) -> None:
        super().fallocate(descriptor, size)
        self._look()

    def pwrite(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        written = super().pwrite(descriptor, buffer, offset)
        self._look()
        return written

    def pread(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        if threading.current_thread().name.startswith("hicache-disk") and not self.reading.is_set():
            self.reading.set()
            assert self.go.wait(PATIENCE_S)
        return super().pread(descriptor, buffer, offset)


def test_t072_hard_cap(tmp_path: Path) -> None:
    port = Held()
    store = DiskStore(DiskConfig(str(tmp_path), CAP, segment_bytes=10 * PAGE, fsync="never", io_threads=4), os_port=port)
    port.store = store
    assert store.put([name(0)], [page(0)], PATIENCE_S) == 1
    slow: list[tuple[int, bool]] = []
    stop = threading.Event()
    wrong: list[int] = []

    def read_slowly() -> None:
        target = np.zeros(PAGE, np.uint8)
        hit = store.get([name(0)], [target], PATIENCE_S)
        slow.append((hit, bool((target == page(0)).all())))

    def read(seed: int) -> None:
        chance = np.random.default_rng(seed)
        while not stop.is_set():
            numbers = [int(n) for n in chance.integers(1, 500, 4)]
            targets = [np.zeros(PAGE, np.uint8) for _ in numbers]
            hit = store.get([name(n) for n in numbers], targets, PATIENCE_S)
            wrong.extend(numbers[i] for i in bits.each(hit) if not (targets[i] == page(numbers[i])).all())

    held = threading.Thread(target=read_slowly)
    held.start()
    assert port.reading.wait(PATIENCE_S)
    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    for reader in readers:
        reader.start()
    for first in range(1, 501, 5):
        numbers = range(first, first + 5)
        assert store.put([name(n) for n in numbers], [page(n) for n in numbers], PATIENCE_S) == 0x1F
        assert store.disk_bytes() <= CAP
    stop.set()
    port.go.set()
    for reader in [held, *readers]:
        reader.join()
    assert slow == [(1, True)]  # the page whose read was in flight all that time
    assert wrong == []
    stats = store.stats(PATIENCE_S)
    assert stats.evictions >= 400
    assert stats.objects * PAGE == stats.used_bytes < CAP
    assert 0 < port.most <= CAP
    store.check()
    store.close()
