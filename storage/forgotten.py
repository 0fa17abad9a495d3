"""What a node was told to forget, kept on its disk: a node that comes back hears of it though all the others were started anew.

    file    magic 8s | version u32 | entries u32 | floor f64 | entry* | xxh3-64 of all that precedes it        little endian, no padding
    entry   when f64 | length u16 | prefix, or id

Times are of time.time(). Everything is forgotten that is older than ``floor``, -inf where nothing is: what stood there once was too much to
name. A file that is damaged, or not ours, says nothing any more: then everything is, from before it was written.
"""

from __future__ import annotations

import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import xxhash

from hicache_ray.errors import StoreError
from hicache_ray.storage.fences import IDS, PREFIXES
from hicache_ray.storage.ids import ID_BYTES

log = logging.getLogger("hicache_ray.storage")

MAGIC, VERSION = b"hicForgt", 1
_HEAD, _ENTRY, _CHECK = struct.Struct("<8sIId"), struct.Struct("<dH"), struct.Struct("<Q")
_LEAST = 1 << 14
_SHARE = 512  # the part of a small disk that the file may take
_KEEP_S = 2.0  # most that a call waits for the disk
_HEARD_S, _HEARD_EVERY_S = 0.5, 5.0  # the same, of the one that says how much was heard; how often it does


@dataclass(frozen=True)
class Told:
    """``entries``: (prefix, when), oldest first. ``floor_at``: everything from before then was forgotten too."""

    entries: Sequence[tuple[bytes, float]] = ()
    floor_at: float = -math.inf


class Damaged(Exception):
    """The file does not say what was forgotten."""


class Disk(Protocol):
    """Where the file lies: a :class:`~hicache_ray.storage.disk.DiskStore`."""

    @property
    def log(self) -> tuple[bytes, float] | None: ...

    def keep_log(self, data: bytes, timeout_s: float) -> None: ...

    def hear(self, at: float, timeout_s: float) -> None: ...


def log_bytes(size_bytes: int) -> int:
    """Of the file at most, on a disk store of this size."""
    whole = _HEAD.size + (PREFIXES + IDS) * (_ENTRY.size + ID_BYTES) + _CHECK.size
    return min(whole, max(size_bytes // _SHARE, _LEAST))


def pack(told: Told, most: int) -> bytes:
    """In ``most`` bytes; what does not fit counts for everything."""
    room, first = most - _HEAD.size - _CHECK.size, len(told.entries)
    while first and (room := room - _ENTRY.size - len(told.entries[first - 1][0])) >= 0:
        first -= 1
    floor_at = max(told.floor_at, told.entries[first - 1][1]) if first else told.floor_at
    kept = told.entries[first:]
    parts = [_HEAD.pack(MAGIC, VERSION, len(kept), floor_at)]
    parts += [_ENTRY.pack(at, len(prefix)) + prefix for prefix, at in kept]
    body = b"".join(parts)
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def unpack(data: bytes) -> Told:
    """Raises Damaged."""
    body = data[: -_CHECK.size]
    if len(body) < _HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise Damaged("is not of this program")
    _, version, count, floor_at = _HEAD.unpack_from(body)
    if _CHECK.pack(xxhash.xxh3_64_intdigest(body)) != data[len(body) :]:
        raise Damaged("is damaged")
    if version != VERSION:
        raise Damaged(f"is of version {version}, and this program knows {VERSION}")
    entries, place = [], _HEAD.size
    try:
        for _ in range(count):
            at, length = _ENTRY.unpack_from(body, place)
            place += _ENTRY.size + length
            entries.append((body[place - length : place], at))
    except struct.error as error:
        raise Damaged("ends too early") from error
    if place != len(body) or not all(math.isfinite(at) for _, at in entries) or not floor_at < math.inf:
        raise Damaged("says nonsense")
    return Told(entries, floor_at)


class ForgottenLog:
    """The file as one :class:`~hicache_ray.storage.directory.HomeIndex` keeps it. ``wall``: as time.time()."""

    def __init__(self, disk: Disk, most_bytes: int, wall: Callable[[], float] = time.time) -> None:
        self._disk, self._most, self._wall = disk, most_bytes, wall
        self._lock = threading.Lock()  # of who writes
        self._saved = -1
        self._well = True
        self._heard_at = -math.inf
        self.failures = 0

    def load(self, now: float) -> Told:
        """What was told in earlier lives, in times of a clock that says ``now``."""
        found, wall = self._disk.log, self._wall()
        if found is None:
            return Told()
        data, written_at = found
        try:
            told = unpack(data)
        except Damaged as error:
            log.warning("the file that says what was dropped %s; nodes that come back will drop all that they have from before it", error)
            told = Told(floor_at=written_at)

        def here(at: float) -> float:
            return now - max(wall - at, 0.0)

        return Told([(prefix, here(at)) for prefix, at in told.entries], here(told.floor_at))

    def save(self, epoch: int, told: Callable[[], tuple[int, Told, float]], timeout_s: float) -> None:
        """Write what ``told()`` says (its epoch, what was told, and now), unless what has been written since is of ``epoch`` or later.

        A disk that refuses it is said in the log, and counted: then it is known for as long as this node lives, and no longer.
        """
        until = time.monotonic() + min(timeout_s, _KEEP_S)
        if not self._lock.acquire(timeout=max(until - time.monotonic(), 0.0)):
            self._failed("the disk is busy")
            return
        try:
            if self._saved >= epoch:
                return
            saving, said, now = told()
            ahead = self._wall() - now
            entries = sorted(((prefix, at + ahead) for prefix, at in said.entries), key=lambda entry: entry[1])
            self._disk.keep_log(pack(Told(entries, said.floor_at + ahead), self._most), until - time.monotonic())
            self._saved, self._well = saving, True
        except StoreError as error:
            self._failed(str(error))
        finally:
            self._lock.release()

    def heard(self, ago_s: float) -> None:
        """Up to so many seconds ago this node has heard of all that it was to forget: only for what was later must the next life ask. From
        one thread."""
        at = self._wall() - ago_s
        if 0 <= at - self._heard_at < _HEARD_EVERY_S:
            return
        self._heard_at = at
        with suppress(StoreError):  # then it asks for more
            self._disk.hear(at, _HEARD_S)

    def _failed(self, why: str) -> None:
        self.failures += 1
        if self._well:
            log.warning("what was dropped is not kept on the disk (%s): a node that was away may not hear of it after a restart", why)
        self._well = False
