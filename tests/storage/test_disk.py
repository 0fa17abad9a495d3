"""The disk store beyond what every store does: starts, caps, files, leases in memory, refusals."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hicache_ray.errors import ConfigError, StoreClosed, StoreError, StoreTimeout
from hicache_ray.storage import DiskConfig
from hicache_ray.storage.disk_format import Geometry, geometry, slot_size
from hicache_ray.storage.disk_io import DiskOs
from hicache_ray.storage.disk_work import Workers
from hicache_ray.store import DIGEST_BYTES, GROUP_BYTES, KEY_BYTES, SPACE_BYTES, TAG_BYTES
from tests.storage.conftest import FakeClock
from tests.storage.disks import BLOCK, CountingOs, OpenDisk, get, no_memory, put, size_of, small, sound, visible
from tests.storage.objects import TIMEOUT_S, name, page


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_start_finds_what_a_close_left(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path))
    assert put(store, list(range(12))) == set(range(12))
    store.drop([name(3)], TIMEOUT_S)
    store.describe(b"tag", {"model": "a"}, TIMEOUT_S)
    store.close()
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.seg")}
    store = disk(small(tmp_path))
    assert visible(store) == [n for n in range(12) if n != 3]
    assert store.described(TIMEOUT_S) == {b"tag": {"model": "a"}}
    sound(store)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.seg")} == before
    store.close()


def test_footers_are_used_and_are_taken_back_before_the_first_write(tmp_path: Path, disk: OpenDisk) -> None:
    config = small(tmp_path)
    store = disk(config)
    put(store, list(range(0, 9, 3)))
    store.close()
    (path,) = tmp_path.glob("*.seg")
    shape = Geometry(BLOCK, 8)
    with open(path, "r+b") as file:  # without its records a segment shows what its footer says
        records = file.read(shape.data)[2 * BLOCK :]
        file.seek(2 * BLOCK)
        file.write(bytes(len(records)))
    store = disk(config)
    assert visible(store) == [0, 3, 6]
    assert get(store, [0, 3, 6]) == {0, 3, 6}
    put(store, [9])
    crashed = tmp_path.parent / "crashed"
    crashed.mkdir()
    for found in tmp_path.iterdir():
        (crashed / found.name).write_bytes(found.read_bytes())
    store.close()
    store = disk(small(crashed))
    assert visible(store) == [0, 3, 6, 9]  # the block of records was written whole again, the footer is of no more use
    assert not any(segment.has_footer for segment in store._index.segments())
    sound(store)
    store.close()


@pytest.mark.parametrize("where", ["pointer", "footer"])
def test_a_damaged_footer_is_not_believed(tmp_path: Path, disk: OpenDisk, where: str) -> None:
    store = disk(small(tmp_path))
    put(store, [0, 3, 6])
    store.close()
    (path,) = tmp_path.glob("*.seg")
    data = bytearray(path.read_bytes())
    data[BLOCK + 20 if where == "pointer" else Geometry(BLOCK, 8).footer + 300] ^= 1
    path.write_bytes(data)
    store = disk(small(tmp_path))
    assert visible(store) == [0, 3, 6]
    sound(store)
    store.close()


def test_uses_outlive_a_close(tmp_path: Path, disk: OpenDisk) -> None:
    """What was read last before the close is evicted last after it."""
    config = DiskConfig(str(tmp_path), Geometry(BLOCK, 8).disk_bytes + BLOCK, segment_bytes=8 * BLOCK)
    store = disk(config)
    put(store, [3 * n for n in range(8)])  # 21 is the oldest of them
    get(store, [21])
    store.close()
    store = disk(config)
    put(store, [30])
    assert visible(store) == [0, 3, 6, 9, 12, 15, 21, 30]
    store.close()


def test_a_torn_record_and_a_foreign_record_are_no_objects(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path, direct="off"))
    put(store, [0, 3, 6, 9])
    (path,) = tmp_path.glob("*.seg")
    data = bytearray(path.read_bytes())  # as it is before the close: without a footer
    store.close()
    at = 2 * BLOCK
    data[at + 128 + 40] ^= 1  # slot 1: a bit of the record
    data[at + 5 * 128 : at + 6 * 128] = data[at : at + 128]  # slot 5: the record of slot 0
    path.write_bytes(data)
    store = disk(small(tmp_path))
    assert visible(store) == [0, 6, 9]
    sound(store)
    store.close()


def test_a_cut_file_keeps_what_is_before_the_cut(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path))
    put(store, [0, 3, 6, 9])
    store.close()
    (path,) = tmp_path.glob("*.seg")
    os.truncate(path, Geometry(BLOCK, 8).at(2))
    store = disk(small(tmp_path))
    assert visible(store) == [0, 3]
    assert path.stat().st_size == Geometry(BLOCK, 8).file_bytes
    sound(store)
    put(store, [6, 9])
    sound(store)
    store.close()


def test_a_file_that_is_cut_while_it_is_open_is_a_miss(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path))
    put(store, [0, 3, 6, 9])
    (path,) = tmp_path.glob("*.seg")
    os.truncate(path, Geometry(BLOCK, 8).at(2))
    assert get(store, [0, 3, 6, 9]) == {0, 3}
    assert store.stats(TIMEOUT_S).checksum_failures == 2
    assert visible(store) == [0, 3]
    store.close()


def test_a_smaller_cap_cuts_before_it_serves(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path, size_bytes=8 * 15 * BLOCK))
    for n in range(40):
        put(store, [3 * n])
    assert store.disk_bytes() > 3 * 15 * BLOCK
    store.close()
    store = disk(small(tmp_path, size_bytes=3 * 15 * BLOCK))
    assert store.disk_bytes() <= 3 * 15 * BLOCK
    assert visible(store) == [3 * n for n in range(24, 40)]  # the last two segments
    sound(store)
    store.close()


def test_segments_of_another_size_are_served_and_count(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path))
    put(store, [0, 1, 2])
    store.close()
    store = disk(small(tmp_path, segment_bytes=4 * BLOCK))
    assert visible(store) == [0, 1, 2]
    for n in range(3, 60):
        put(store, [n])
        assert store.disk_bytes() <= 6 * 15 * BLOCK
    sound(store)
    store.close()


def test_other_files_count_and_stay(tmp_path: Path, disk: OpenDisk) -> None:
    (tmp_path / "notes.txt").write_bytes(bytes(3 * 15 * BLOCK))
    store = disk(small(tmp_path))
    for n in range(60):
        put(store, [n])
        assert store.disk_bytes() <= 6 * 15 * BLOCK
    sound(store)
    store.close()
    assert (tmp_path / "notes.txt").stat().st_size == 3 * 15 * BLOCK
    with pytest.raises(ConfigError, match="leaves no room for a segment of .* beside the .* bytes of other files"):
        disk(small(tmp_path, size_bytes=4 * 15 * BLOCK, segment_bytes=16 * BLOCK))


def test_room_moves_between_sizes(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path))
    for n in range(0, 150, 3):
        put(store, [n])
    for n in range(2, 60, 3):
        assert put(store, [n]) == {n}
    sound(store)
    assert set(visible(store)) == set(range(23, 60, 3))  # nothing of the other size is left
    store.close()


def test_export_is_an_arrow_file(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path))
    put(store, list(range(6)))
    store.drop([name(2)], TIMEOUT_S)
    out = tmp_path / "out.arrow"
    assert store.export(out) == 5
    table = pa.ipc.open_file(pa.memory_map(str(out))).read_all()
    assert table.column_names == [
        "space", "group", "digest", "tag", "length", "checksum", "sequence", "used", "segment", "slot", "offset"
    ]  # fmt: skip
    rows = sorted(table.to_pylist(), key=lambda row: row["digest"])
    assert [row["space"] + row["group"] + row["digest"] + row["tag"] for row in rows] == [name(n) for n in (0, 1, 3, 4, 5)]
    assert [len(rows[0][part]) for part in ("space", "group", "digest", "tag")] == [SPACE_BYTES, GROUP_BYTES, DIGEST_BYTES, TAG_BYTES]
    assert [row["length"] for row in rows] == [size_of(n) for n in (0, 1, 3, 4, 5)]
    for row, number in zip(rows, (0, 1, 3, 4, 5), strict=True):  # who reads the files with it finds the objects
        with open(tmp_path / f"hicache-{row['segment']:08d}.seg", "rb") as file:
            file.seek(row["offset"])
            assert file.read(row["length"]) == page(number, size_of(number)).tobytes()
    with pytest.raises(StoreError, match="cannot export to"):
        store.export(tmp_path / "missing" / "out.arrow")
    store.close()


@pytest.mark.parametrize("direct", ["off", "auto"])
@pytest.mark.parametrize("fsync", ["never", "batch", "always"])
def test_every_policy_stores(tmp_path: Path, disk: OpenDisk, direct: str, fsync: str) -> None:
    port = CountingOs()
    store = disk(small(tmp_path, direct=direct, fsync=fsync), os_port=port)
    put(store, [0])
    before = port.calls["fdatasync"]
    put(store, [3, 6])
    assert port.calls["fdatasync"] - before == {"never": 0, "batch": 1, "always": 2}[fsync]
    assert store.direct == (direct == "auto" and os.path.exists(tmp_path))
    sound(store)
    store.close()


def test_objects_longer_than_staging_and_neighbours_in_one_call(tmp_path: Path, disk: OpenDisk) -> None:
    port = CountingOs()
    config = DiskConfig(str(tmp_path), 8 << 20, segment_bytes=1 << 20, staging_bytes=64 << 10, io_threads=2)
    store = disk(config, os_port=port)
    sizes = {1: 1_000_003, 2: 64 << 10, 3: (64 << 10) + 1, 4: 1 << 20}
    for number, size in sizes.items():
        assert store.put([name(number)], [page(number, size)], TIMEOUT_S) == 1
    for number, size in sizes.items():
        target = np.zeros(size, np.uint8)
        assert store.get([name(number)], [target], TIMEOUT_S) == 1
        assert (target == page(number, size)).all()
    small_ones = list(range(10, 26))
    before = port.calls["pwrite"]
    store.put([name(n) for n in small_ones], [page(n, BLOCK) for n in small_ones], TIMEOUT_S)
    assert port.calls["pwrite"] - before == 3  # superblock of their segment, objects, records
    before = port.calls["pread"]
    targets = [np.zeros(BLOCK, np.uint8) for _ in small_ones]
    assert store.get([name(n) for n in small_ones], targets, TIMEOUT_S) == 0xFFFF
    assert port.calls["pread"] - before == 1
    store.damage(name(1))
    assert store.get([name(1)], [np.zeros(sizes[1], np.uint8)], TIMEOUT_S) == 0
    store.check()
    store.close()


@pytest.mark.parametrize("length", [64 << 10, (64 << 10) + 1, 100_000, 1 << 20, 1_300_001, 5_000_000])
def test_little_is_wasted(length: int) -> None:
    slot = slot_size(length)
    assert slot % BLOCK == 0
    assert length <= slot
    assert (slot - length) / slot < 0.06
    shape = geometry(slot, 64 << 20, 1 << 40)
    assert shape is not None
    assert (shape.disk_bytes - shape.slots * slot) / shape.disk_bytes < 0.01


def test_index_memory_per_object(tmp_path: Path, disk: OpenDisk) -> None:
    count = 4000
    store = disk(DiskConfig(str(tmp_path), 32 << 20, segment_bytes=1 << 20, fsync="never"))
    data = np.zeros(16, np.uint8)
    for first in range(0, count, 500):
        store.put([name(n) for n in range(first, first + 500)], [data] * 500, TIMEOUT_S)
    assert store.stats(TIMEOUT_S).objects == count
    assert store.index_bytes / count < 250
    store.close()
    store = disk(DiskConfig(str(tmp_path), 32 << 20, segment_bytes=1 << 20, fsync="never"))
    assert store.stats(TIMEOUT_S).objects == count
    assert set(store.scan()) == {name(n) for n in range(count)}
    assert store.index_bytes / count < 250
    store.check()
    store.close()


def test_a_lease_runs_out_and_memory_of_leases_is_bounded(tmp_path: Path, disk: OpenDisk) -> None:
    clock = FakeClock()
    store = disk(small(tmp_path, lease_bytes=3 * BLOCK), clock)
    put(store, [0, 1, 3])
    first = store.lease([name(0), name(1), name(3)], TIMEOUT_S)
    assert [view is not None for view in first.views] == [True, True, False]
    assert first.valid() == 0b11
    assert store.lease([name(0)], TIMEOUT_S).views == [None]
    clock.advance(9.9)
    assert first.valid() == 0b11
    clock.advance(0.2)
    assert first.valid() == 0
    assert store.stats(TIMEOUT_S).leases == 0
    with store.lease([name(0)], TIMEOUT_S) as second:
        assert second.valid() == 1
        assert store.damage(name(0))
        assert second.views[0] is not None
        assert bytes(second.views[0]) == page(0, size_of(0)).tobytes()
    assert store.lease([name(0)], TIMEOUT_S).valid() == 0  # damaged
    store.check()
    store.close()


def test_a_lease_for_which_there_is_no_memory_holds_nothing(tmp_path: Path, disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    store = disk(small(tmp_path, lease_bytes=3 * BLOCK))
    put(store, [0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", no_memory)
        with pytest.raises(StoreError, match=f"no memory for the {size_of(0) + size_of(1)} bytes"):
            store.lease([name(0), name(9), name(1)], TIMEOUT_S)
    assert store._index.slots.pins == {}
    with store.lease([name(0), name(1)], TIMEOUT_S) as lent:
        assert lent.valid() == 0b11
    store.check()


def test_nothing_is_left_by_a_close_nor_by_a_refused_start(tmp_path: Path, disk: OpenDisk) -> None:
    before = descriptors()
    store = disk(small(tmp_path))
    put(store, list(range(30)))
    with pytest.raises(ConfigError, match="belongs to a store that is running; stop it or choose another"):
        disk(small(tmp_path))
    store.close()
    store.close()
    assert descriptors() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hicache")]


def test_another_process_cannot_open_it(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path))
    code = "import sys; from hicache_ray.storage import *; DiskStore(DiskConfig(sys.argv[1], 1 << 20))"
    refused = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "belongs to a store that is running" in refused.stderr
    store.close()


class Refusing(DiskOs):
    def __init__(self, code: int, direct_only: bool) -> None:
        self.code, self.direct_only = code, direct_only

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        if not self.direct_only or flags & os.O_DIRECT:
            raise OSError(self.code, os.strerror(self.code))
        return super().open(path, flags, mode)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (errno.ENOSPC, "is full; free space"), (errno.EROFS, "read-only file system; mount it writable"),
        (errno.EACCES, "may not be written by this user; change its owner"), (errno.EIO, "cannot be used .*check the disk"),
    ],
)  # fmt: skip
def test_a_directory_that_refuses(tmp_path: Path, disk: OpenDisk, code: int, sentence: str) -> None:
    before = descriptors()
    with pytest.raises(ConfigError, match=sentence):
        disk(small(tmp_path), os_port=Refusing(code, False))
    assert descriptors() == before


def test_without_direct_io_there_is_the_cache_or_a_refusal(tmp_path: Path, disk: OpenDisk) -> None:
    store = disk(small(tmp_path), os_port=Refusing(errno.EINVAL, True))
    assert not store.direct
    put(store, [1])
    sound(store)
    store.close()
    with pytest.raises(ConfigError, match="has no direct I/O; set storage.disk.direct to auto or off"):
        disk(small(tmp_path, direct="on"), os_port=Refusing(errno.EINVAL, True))


def test_bad_settings_say_what_to_change(tmp_path: Path, disk: OpenDisk) -> None:
    with pytest.raises(ConfigError, match="does not exist; create it"):
        disk(small(tmp_path / "missing"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        disk(small(tmp_path / "file"))
    with pytest.raises(ConfigError, match="make storage.disk.size_bytes smaller"):
        disk(small(tmp_path, size_bytes=1 << 60))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"direct": "maybe"}, "auto, on, off"), ({"fsync": "often"}, "never, batch, always"), ({"io_threads": 0}, "must be positive"),
        ({"segment_bytes": 5000}, "multiple of 4096"), ({"staging_bytes": 5000}, "multiple of 4096"),
    ]  # fmt: skip
    for settings, sentence in wrong:
        with pytest.raises(ConfigError, match=sentence):
            small(tmp_path, **settings)


def test_a_full_disk_turns_writes_off_and_they_come_back(tmp_path: Path, disk: OpenDisk) -> None:
    clock, full = FakeClock(), threading.Event()

    def strike(number: int, call: str, arguments: tuple[Any, ...]) -> None:
        if full.is_set() and call in ("pwrite", "fallocate"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    port = CountingOs(strike)
    store = disk(small(tmp_path, retry_s=30.0), clock, port)
    put(store, [0, 3])
    full.set()
    assert put(store, [0, 6]) == {0}
    assert "No space left on device" in store.stats(TIMEOUT_S).writes_off
    full.clear()
    writes = port.calls["pwrite"]
    assert put(store, [0, 9]) == {0}  # not even tried
    assert port.calls["pwrite"] == writes
    assert get(store, [0, 3]) == {0, 3}
    assert store.stats(TIMEOUT_S).put_refused == 2
    clock.advance(30.0)
    assert put(store, [6, 9]) == {6, 9}
    assert store.stats(TIMEOUT_S).writes_off == ""
    sound(store)
    store.close()


@pytest.mark.parametrize("call", ["pread", "pwrite", "fallocate"])
def test_a_disk_that_hangs_is_a_timeout_and_nobody_touches_the_buffers(tmp_path: Path, disk: OpenDisk, call: str) -> None:
    hang, free = threading.Event(), threading.Event()

    def strike(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        if hang.is_set() and name == call:
            free.wait(30.0)

    store = disk(small(tmp_path, io_threads=2), os_port=CountingOs(strike))
    put(store, [0, 3])
    hang.set()
    number = {"pread": 0, "pwrite": 6, "fallocate": 1}[call]  # 1 is the first of its size
    target = np.zeros(size_of(number), np.uint8)
    ask = store.get if call == "pread" else store.put
    with pytest.raises(StoreTimeout):
        ask([name(number)], [target], 0.05)
    assert visible(store) == [0, 3]  # what needs no disk is answered
    store.check()
    hang.clear()
    free.set()
    assert put(store, [9]) == {9}
    assert get(store, [0, 3, 6, 9]) == {0, 3, 9}
    assert not target.any()
    store.close()
    store.check()
    assert store._index.reserved == {}
    assert store._index.slots.pins == {}


def test_workers_that_are_closed_let_a_batch_go() -> None:
    workers, gone = Workers(2, BLOCK), threading.Event()
    assert workers.run([lambda staging, batch: None] * 3, time.monotonic() + TIMEOUT_S) == [None] * 3
    assert workers.close(TIMEOUT_S)
    with pytest.raises(StoreClosed):
        workers.run([lambda staging, batch: None] * 3, time.monotonic() + TIMEOUT_S, gone.set)
    assert gone.is_set()


def test_a_record_that_the_disk_hangs_on_keeps_nobody_else_waiting(tmp_path: Path, disk: OpenDisk) -> None:
    hang, free = threading.Event(), threading.Event()

    def strike(number: int, call: str, arguments: tuple[Any, ...]) -> None:
        if hang.is_set() and call == "rename":
            assert free.wait(30.0)

    store = disk(small(tmp_path, io_threads=2), os_port=CountingOs(strike))
    put(store, [0])
    hang.set()
    with pytest.raises(StoreTimeout):
        store.describe(b"first", {"model": "a"}, 0.5)
    assert get(store, [0]) == {0}
    assert put(store, [3]) == {3}
    assert store.described(TIMEOUT_S) == {b"first": {"model": "a"}}
    hang.clear()
    free.set()
    store.describe(b"second", {"model": "b"}, TIMEOUT_S)
    sound(store)
    store.close()
    assert disk(small(tmp_path)).described(TIMEOUT_S) == {b"first": {"model": "a"}, b"second": {"model": "b"}}


def test_a_disk_that_hangs_does_not_hold_up_a_close_and_keeps_its_files(tmp_path: Path, disk: OpenDisk) -> None:
    hang, inside, free = threading.Event(), threading.Event(), threading.Event()

    def strike(number: int, call: str, arguments: tuple[Any, ...]) -> None:
        if hang.is_set() and call == "pwrite":
            inside.set()
            assert free.wait(30.0)

    store = disk(small(tmp_path), os_port=CountingOs(strike))
    put(store, [0])
    hang.set()
    with ThreadPoolExecutor(1) as writer:
        late = writer.submit(put, store, [3])
        assert inside.wait(30.0)
        store.close(0.1)
        with pytest.raises(StoreClosed):
            get(store, [0])
        with pytest.raises(ConfigError, match="belongs to a store that is running"):
            disk(small(tmp_path))
        free.set()
        with pytest.raises(StoreClosed):
            late.result(30.0)
    assert store._workers.close(30.0)
    store._files.close()
    assert visible(disk(small(tmp_path))) == [0]


def test_a_put_that_a_clear_overtakes_stores_nothing(tmp_path: Path, disk: OpenDisk) -> None:
    """Nor after the next start."""
    inside, go = threading.Event(), threading.Event()
    objects = Geometry(BLOCK, 8).data

    def strike(number: int, call: str, arguments: tuple[Any, ...]) -> None:
        if call == "pwrite" and arguments[2] > objects and not inside.is_set():
            inside.set()
            assert go.wait(30.0)

    store = disk(small(tmp_path, io_threads=2), os_port=CountingOs(strike))
    put(store, [0])
    found: list[set[int]] = []
    writer = threading.Thread(target=lambda: found.append(put(store, [3])))
    writer.start()
    assert inside.wait(30.0)
    assert store.lookup([name(3)[:KEY_BYTES]], [name(3)[KEY_BYTES:]], TIMEOUT_S)[name(3)[KEY_BYTES:]].pending == 1
    assert store.clear(TIMEOUT_S) == 1
    go.set()
    writer.join()
    assert found == [set()]
    assert visible(store) == []
    store.close()
    store = disk(small(tmp_path))
    assert visible(store) == []
    store.close()


def test_two_puts_of_one_object_store_it_once(tmp_path: Path, disk: OpenDisk) -> None:
    """Both need a segment; by the time the second one has its own, the first has stored the object."""
    claims, made, stored = threading.Semaphore(0), itertools.count(), threading.Event()

    def strike(number: int, call: str, arguments: tuple[Any, ...]) -> None:
        if call == "fallocate" and arguments[1] > BLOCK:
            assert stored.wait(30.0) if next(made) else all(claims.acquire(timeout=30.0) for _ in range(2))

    store = disk(small(tmp_path, io_threads=2), os_port=CountingOs(strike))
    claim = store._files.claim

    def claim_and_tell(shape: Geometry) -> None:
        claim(shape)
        claims.release()

    store._files.claim = claim_and_tell  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as writers:
        puts = [writers.submit(put, store, [3]) for _ in range(2)]
        ended, _ = wait(puts, 30.0, FIRST_COMPLETED)
        stored.set()
        assert len(ended) == 1
        assert [each.result(30.0) for each in puts] == [{3}, {3}]
    sound(store)
    assert store.stats(TIMEOUT_S).puts == 1
    store.drop([name(3)], TIMEOUT_S)
    assert visible(store) == []
    store.close()
    assert visible(disk(small(tmp_path))) == []


def test_what_was_given_up_is_not_written_to(tmp_path: Path, disk: OpenDisk) -> None:
    """Its descriptor is closed, and may be another file's."""
    port = CountingOs()
    store = disk(small(tmp_path), os_port=port)
    put(store, [0, 3])
    (segment,) = store._index.segments()
    store.clear(TIMEOUT_S)
    for n in range(1, 100, 3):
        put(store, [n])
    assert segment not in store._index.segments()
    with store._lock:
        segment.write_record(0, b"")
    before = port.calls["pwrite"]
    assert store._writer.flush([segment], time.monotonic() + TIMEOUT_S, True) == {}
    assert port.calls["pwrite"] == before
    sound(store)


def test_a_drop_removes_the_files_that_hold_what_was_evicted(tmp_path: Path, disk: OpenDisk) -> None:
    """An object went with its segment, whose file could not be removed: once it is dropped, no start may bring it back."""
    refuse = threading.Event()

    def strike(number: int, call: str, arguments: tuple[Any, ...]) -> None:
        if call == "unlink" and refuse.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    clock = FakeClock()
    store = disk(small(tmp_path), clock, CountingOs(strike))
    for n in range(0, 150, 3):
        put(store, [n])
    refuse.set()
    put(store, [1])  # takes the coldest segment, but cannot have its file
    gone = [n for n in range(0, 150, 3) if n not in visible(store)][-1]
    with pytest.raises(StoreError, match="some may come back at the next start"):
        store.drop([name(gone)], TIMEOUT_S)
    refuse.clear()
    store.drop([name(gone)], TIMEOUT_S)
    crashed = tmp_path.with_name(f"{tmp_path.name}-crashed")
    shutil.copytree(tmp_path, crashed)
    assert gone not in visible(disk(small(crashed)))
    sound(store)


def test_a_drop_waits_until_no_loss_of_power_brings_a_removed_file_back(tmp_path: Path, disk: OpenDisk) -> None:
    """Whoever removed it could not go on, and so did not sync the directory."""
    refuse = threading.Event()

    def strike(number: int, call: str, arguments: tuple[Any, ...]) -> None:
        if refuse.is_set() and (call == "fsync" or (call == "open" and arguments[1] & os.O_CREAT)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    port = CountingOs(strike)
    store = disk(small(tmp_path, fsync="batch"), FakeClock(), port)
    for n in range(0, 150, 3):
        put(store, [n])
    assert store.drop([name(141)], TIMEOUT_S) == 1
    synced = port.calls["fsync"]
    refuse.set()
    assert put(store, [1]) == set()  # the coldest segment is gone, and no other is there
    with pytest.raises(StoreError, match="some may come back at the next start"):
        store.drop([name(144)], TIMEOUT_S)
    refuse.clear()
    assert store.drop([name(144)], TIMEOUT_S) == 0
    after = port.calls["fsync"]
    assert after > synced
    assert store.drop([name(147)], TIMEOUT_S) == 1
    assert port.calls["fsync"] == after  # nothing was removed since
    sound(store)


def test_threads_at_once(tmp_path: Path, disk: OpenDisk) -> None:
    """Writers, readers and droppers over one small store: what is read is right, and the books balance at the end."""
    store = disk(small(tmp_path, io_threads=4))
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        chance = np.random.default_rng(seed)
        try:
            for _ in range(40):
                numbers = sorted({int(n) for n in chance.integers(0, 60, 4)})
                put(store, numbers)
                get(store, numbers)
                if seed == 0:
                    store.drop([name(numbers[0])], TIMEOUT_S)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            wait([threads.submit(work, seed) for seed in range(4)], 60.0)
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    sound(store)
    there = visible(store)
    store.close()
    assert visible(disk(small(tmp_path))) == there
