"""What was forgotten is kept on the disk, in its own room, whole or not at all; what says nothing any more counts for everything."""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hicache_ray.errors import ConfigError, StoreError, StoreTimeout
from hicache_ray.storage import DiskStore
from hicache_ray.storage.conformance import Gate
from hicache_ray.storage.conformance_kit import Worker
from hicache_ray.storage.directory import HomeIndex
from hicache_ray.storage.disk_io import BLOCK, DiskOs, Room
from hicache_ray.storage.disk_log import LOG, LOG_TEMPORARY
from hicache_ray.storage.fences import IDS, PREFIXES
from hicache_ray.storage.forgotten import MAGIC, Damaged, ForgottenLog, Told, log_bytes, pack, unpack
from tests.storage.conftest import FakeClock
from tests.storage.disks import CountingOs, FailingOs, OpenDisk, put, small, sound, visible
from tests.storage.objects import TIMEOUT_S, name

SAID = Told([(b"", 5.0), (b"space", 6.5), (name(1), 7.0), (name(2), 7.0)], 4.0)
KEPT = 1 << 14


@dataclass
class Paper:
    """Where a log lies. ``refuses``: it takes nothing."""

    log: tuple[bytes, float] | None = None
    refuses: bool = False
    written: int = 0
    timeouts: list[float] = field(default_factory=list)
    heard: list[float] = field(default_factory=list)

    def keep_log(self, data: bytes, timeout_s: float) -> None:
        if self.refuses:
            raise StoreError("injected: it takes nothing")
        self.written += 1
        self.timeouts.append(timeout_s)
        self.log = data, 1e6

    def hear(self, at: float, timeout_s: float) -> None:
        self.heard.append(at)


class Lives:
    """Home indexes one after the other over one log. ``wall`` and ``clock`` go at one pace, and a new life's clock begins anew."""

    def __init__(self, most: int = 1 << 20) -> None:
        self.paper, self.most = Paper(), most
        self.wall = FakeClock()
        self.wall.advance(1e6)
        self.begin()

    def begin(self) -> HomeIndex:
        self.clock = FakeClock()
        self.index = HomeIndex(clock=self.clock, log=ForgottenLog(self.paper, self.most, self.wall))
        return self.index

    def pass_(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.wall.advance(seconds)


def test_what_was_told_is_read_again() -> None:
    assert unpack(pack(SAID, 1 << 20)) == SAID
    assert unpack(pack(Told(), 1 << 20)) == Told([], -math.inf)
    full = Told([(bytes([1]) + n.to_bytes(63, "big"), float(n)) for n in range(IDS)], 0.0)
    assert unpack(pack(full, log_bytes(1 << 40))) == full


def test_what_does_not_fit_counts_for_everything() -> None:
    size = len(pack(SAID, 1 << 20))
    assert unpack(pack(SAID, size)) == SAID
    assert unpack(pack(SAID, size - 1)) == Told(SAID.entries[1:], 5.0)
    assert unpack(pack(SAID, size - 25)) == Told(SAID.entries[2:], 6.5)
    assert unpack(pack(SAID, size - 26)) == Told(SAID.entries[3:], 7.0)
    assert unpack(pack(SAID, 100)) == Told([], 7.0)
    assert len(pack(SAID, size - 25)) == size - 25


def test_a_file_that_is_not_whole_says_nothing() -> None:
    data = pack(SAID, 1 << 20)
    for cut in range(len(data)):
        with pytest.raises(Damaged):
            unpack(data[:cut])
    for i in range(len(data)):
        with pytest.raises(Damaged):
            unpack(data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :])
    with pytest.raises(Damaged, match="not of this program"):
        unpack(b"#!/bin/sh\n" * 10)


def test_it_is_small_on_a_small_disk() -> None:
    assert log_bytes(1 << 20) == 1 << 14
    assert log_bytes(64 << 20) == 128 << 10
    assert log_bytes(1 << 50) == 24 + 8 + (IDS + PREFIXES) * (10 + 64)


def test_another_life_knows_what_was_forgotten_and_when() -> None:
    lives = Lives()
    lives.index.forget(b"space", TIMEOUT_S)
    lives.pass_(10.0)
    lives.index.forget_ids([name(1), name(2)], TIMEOUT_S)
    lives.pass_(1.0)
    lives.wall.advance(4.0)  # it is down
    index = lives.begin()
    assert index.forgotten(100.0, TIMEOUT_S) == [(b"space", 15.0), (name(1), 5.0), (name(2), 5.0)]
    assert index.forgotten(6.0, TIMEOUT_S) == [(name(1), 5.0), (name(2), 5.0)]
    # It was told then; whether what it has since is from before is for the others to say.
    assert index.knows([b"space", name(1)], 100.0) == 0
    assert index.announce("a:1", [name(1), name(3)], TIMEOUT_S, index.epoch(TIMEOUT_S)) == 0b11
    index.forget_ids([name(1)], TIMEOUT_S)
    assert index.knows([b"space", name(1)], 100.0) == 0b10
    lives.pass_(2.0)
    assert lives.begin().forgotten(100.0, TIMEOUT_S) == [(b"space", 17.0), (name(2), 7.0), (name(1), 2.0)]


def test_a_wall_clock_that_was_put_back_makes_it_late_and_not_lost() -> None:
    lives = Lives()
    lives.index.forget(b"space", TIMEOUT_S)
    lives.wall.advance(-3600.0)
    assert lives.begin().forgotten(0.0, TIMEOUT_S) == [(b"space", 0.0)]


def test_more_than_is_kept_is_everything_in_the_next_life_too() -> None:
    lives = Lives(KEPT)
    lives.index.forget_ids([name(n) for n in range(1000)], TIMEOUT_S)
    lives.pass_(5.0)
    lives.index.forget(b"space", TIMEOUT_S)
    index = lives.begin()
    told = index.forgotten(5.0, TIMEOUT_S)
    assert told[:2] == [(b"", 5.0), (b"space", 0.0)]
    assert len(told) == 2 + (KEPT - 32 - 15) // 74
    assert index.forgotten(4.0, TIMEOUT_S) == [(b"space", 0.0)]
    assert index.knows([b""], 100.0) == 0


@pytest.mark.parametrize("found", [b"", b"something else", pack(SAID, 1 << 20)[:-1], MAGIC + bytes(100)])
def test_a_damaged_log_is_said_and_counts_for_all_from_before_it(found: bytes, caplog: pytest.LogCaptureFixture) -> None:
    lives = Lives()
    lives.paper.log = found, lives.wall() - 30.0
    with caplog.at_level(logging.WARNING, "hicache_ray.storage"):
        index = lives.begin()
    assert ["nodes that come back will drop all that they have from before it" in line for line in caplog.messages] == [True]
    assert index.forgotten(31.0, TIMEOUT_S) == [(b"", 30.0)]
    assert index.forgotten(29.0, TIMEOUT_S) == []
    index.forget(b"space", TIMEOUT_S)
    assert lives.begin().forgotten(31.0, TIMEOUT_S) == [(b"", 30.0), (b"space", 0.0)]


def test_a_disk_that_takes_nothing_is_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    lives = Lives()
    lives.paper.refuses = True
    with caplog.at_level(logging.WARNING, "hicache_ray.storage"):
        assert lives.index.forget(b"a", TIMEOUT_S) == lives.index.forget(b"b", TIMEOUT_S) == 0
    assert ["is not kept on the disk (injected: it takes nothing)" in line for line in caplog.messages] == [True]
    assert lives.index.stats().unkept == 2
    lives.paper.refuses = False
    lives.index.forget(b"c", TIMEOUT_S)
    assert [prefix for prefix, _ in lives.begin().forgotten(1.0, TIMEOUT_S)] == [b"a", b"b", b"c"]
    assert max(lives.paper.timeouts) <= 2.0  # never longer than that, however long the call may take


def test_what_somebody_else_has_written_meanwhile_is_not_written_again() -> None:
    paper = Paper()
    log = ForgottenLog(paper, 1 << 20)
    log.save(3, lambda: (5, SAID, 0.0), TIMEOUT_S)
    log.save(4, lambda: (6, SAID, 0.0), TIMEOUT_S)
    log.save(5, lambda: (7, SAID, 0.0), TIMEOUT_S)
    assert paper.written == 1
    log.save(6, lambda: (7, SAID, 0.0), TIMEOUT_S)
    assert paper.written == 2


def test_it_is_said_now_and_then_up_to_when_all_was_heard() -> None:
    paper, wall = Paper(), FakeClock()
    log = ForgottenLog(paper, 1 << 20, wall)
    wall.advance(1000.0 - wall())
    log.heard(3.0)
    wall.advance(4.0)
    log.heard(3.0)
    wall.advance(1.0)
    log.heard(3.0)
    wall.advance(60.0)
    log.heard(63.0)  # somebody is not there to be asked
    wall.advance(-100.0)
    log.heard(3.0)
    assert paper.heard == [997.0, 1002.0, 962.0]


# -- on a disk -------------------------------------------------------------------------------------------------------------------------


def test_a_log_has_its_own_room_on_a_full_disk(memory: Path, disk: OpenDisk) -> None:
    config = small(memory)
    plain = disk(config)
    room = plain.stats(TIMEOUT_S).capacity_bytes
    plain.close()
    (memory / LOG_TEMPORARY).write_bytes(b"half")
    store = disk(config, log_bytes=KEPT)
    assert store.log is None
    assert store.stats(TIMEOUT_S).capacity_bytes < room
    for first in range(0, 60, 3):
        put(store, [first, first + 1, first + 2])
    data = os.urandom(KEPT)
    for cut in (0, 1):
        store.keep_log(data[cut:], TIMEOUT_S)
        sound(store)
    held = visible(store)
    store.close()
    assert not (memory / LOG_TEMPORARY).exists()
    again = disk(config, log_bytes=KEPT)
    assert again.log is not None
    assert again.log[0] == data[1:]
    assert again.log[1] == pytest.approx((memory / LOG).stat().st_mtime)
    assert visible(again) == held
    sound(again)


def test_a_disk_that_was_full_before_there_was_a_log_makes_room_for_it(memory: Path, disk: OpenDisk) -> None:
    config = small(memory)
    store = disk(config)
    for first in range(0, 60, 3):
        put(store, [first, first + 1, first + 2])
    store.close()
    store = disk(config, log_bytes=KEPT)
    store.keep_log(os.urandom(KEPT), TIMEOUT_S)
    sound(store)
    assert visible(store)


@pytest.mark.parametrize("fsync", ["never", "batch"])
def test_a_log_is_replaced_whole_or_not_at_all(memory: Path, fsync: str) -> None:
    struck, nth = set(), 0
    while True:
        nth += 1
        (directory := memory / str(nth)).mkdir()
        port = FailingOs(0, errno.EIO)
        config = small(directory, fsync=fsync)
        store = DiskStore(config, os_port=port, log_bytes=KEPT)
        store.keep_log(b"old" * 1000, TIMEOUT_S)
        port.fail(port.calls.total() + nth)
        wanted = {b"new"}
        try:
            store.keep_log(b"new" * 1000, TIMEOUT_S)
        except StoreError:
            wanted = {b"old", b"new"} if port.struck in ("fsync", "open") else {b"old"}  # the directory: it may not last
        port.fail(0)
        last = not port.struck
        struck.add(port.struck)
        store.close()
        store = DiskStore(config, log_bytes=KEPT)
        assert store.log is not None
        assert store.log[0][:3] in wanted
        assert len(store.log[0]) == 3000
        sound(store)
        store.close()
        shutil.rmtree(directory)
        if last:
            break
    assert struck == {"", "open", "pwrite", "close", "rename"} | ({"fdatasync", "fsync"} if fsync == "batch" else set())


def test_how_long_a_node_was_away_counts_from_when_it_had_heard_of_everything(memory: Path, disk: OpenDisk) -> None:
    """Not from when it wrote last, which may be before it asked."""

    def again() -> DiskStore:
        store.close()
        return disk(small(memory), log_bytes=KEPT)

    store = disk(small(memory), log_bytes=KEPT)
    assert store.away_s == 0.0
    put(store, [1])
    store.hear(time.time() - 1000.0, TIMEOUT_S)
    for number in (2, 3):
        store = again()
        assert 1000.0 <= store.away_s < 2000.0
        put(store, [number])
    store.hear(time.time(), TIMEOUT_S)
    store = again()
    assert store.away_s < 1000.0
    store.drop([name(1), name(2), name(3)], TIMEOUT_S)
    store.hear(time.time() - 1000.0, TIMEOUT_S)
    assert again().away_s == 0.0  # it has nothing that somebody may have dropped


@pytest.mark.parametrize("said", [True, False])
def test_where_the_clock_was_put_back_nobody_knows_how_long_a_node_was_away(memory: Path, disk: OpenDisk, said: bool) -> None:
    kept = KEPT if said else 0
    store = disk(small(memory), log_bytes=kept)
    put(store, [1])
    store.close()
    ahead = time.time() + 3600.0
    for file in memory.iterdir():
        os.utime(file, (ahead, ahead))
    assert disk(small(memory), log_bytes=kept).away_s > 1e9


def test_a_log_that_nobody_waits_for_any_more_does_not_take_the_place_of_a_later_one(memory: Path, disk: OpenDisk) -> None:
    """A disk that hangs for a while, and then does all that it was asked."""
    gate, written = Gate(), []

    def strike(number: int, call: str, arguments: tuple[Any, ...]) -> None:
        if call == "pwrite" and len(arguments[1]) == 3:
            written.append(bytes(arguments[1]))
            if len(written) == 1:
                gate.stop()

    store = disk(small(memory, io_threads=4), os_port=CountingOs(strike), log_bytes=KEPT)
    hanging = Worker(lambda: store.keep_log(b"one", TIMEOUT_S))
    assert gate.reached.wait(TIMEOUT_S)
    for late in (b"two", b"2.5"):
        with pytest.raises(StoreTimeout):
            store.keep_log(late, 0.05)
    last = Worker(lambda: store.keep_log(b"end", TIMEOUT_S))
    gate.open()
    hanging.join()
    last.join()
    store.close()
    assert written == [b"one", b"end"]
    assert (memory / LOG).read_bytes() == b"end"


def test_the_room_of_a_log_that_is_not_there_yet_must_be_free(memory: Path, disk: OpenDisk) -> None:
    class Tight(DiskOs):
        free = 0

        def room(self, directory: str) -> Room:
            return Room(self.free)

    config, port = small(memory), Tight()
    port.free = config.size_bytes - BLOCK - 1  # but for the lock, it may take all of it
    with pytest.raises(ConfigError, match="the store may take"):
        disk(config, os_port=port, log_bytes=KEPT)
    port.free += 1
    store = disk(config, os_port=port, log_bytes=KEPT)
    store.keep_log(os.urandom(KEPT), TIMEOUT_S)
    store.close()
    port.free -= KEPT  # the successor's is still to be had
    disk(config, os_port=port, log_bytes=KEPT)
