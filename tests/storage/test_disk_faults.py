"""The 1st, 2nd, ... n-th call of the operating system fails until a script passes untouched; and disks that are full, broken or hang."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from hicache_ray.errors import ConfigError, StoreError
from hicache_ray.storage import DiskStore
from tests.storage.disks import FailingOs, put, small, sound, visible
from tests.storage.objects import TIMEOUT_S, name


def script(directory: Path, port: FailingOs, fsync: str) -> None:
    """Put, read, evict, drop, start again, twice. Whatever fails, nothing wrong is served, then or later."""
    config = small(directory, size_bytes=(3 * 15 + 4) * 4096, fsync=fsync)
    for start in range(2):
        try:
            store = DiskStore(config, os_port=port)
        except ConfigError:
            assert port.struck
            store = DiskStore(config, os_port=port)
        try:
            for first in range(0, 12, 3):  # of three sizes, then of one: a segment must change its class
                numbers = [first, first + 1, first + 2] if not start else [3 * n for n in range(100 + first, 103 + first)]
                before = port.struck
                seen = put(store, numbers)
                assert seen <= set(visible(store))
                assert seen == set(numbers) or port.struck
                if port.struck != before:
                    sound(store)
            try:
                store.drop([name(n) for n in visible(store)[:2]], TIMEOUT_S)
            except StoreError:
                assert port.struck
            store.describe(b"digest", {"start": str(start)}, TIMEOUT_S)
            look(store, port)
        finally:
            store.close()
    store = DiskStore(config)
    sound(store)
    assert store.described(TIMEOUT_S) == {b"digest": {"start": "1"}} or port.struck
    store.close()


def look(store: DiskStore, port: FailingOs) -> None:
    """Sound, unless the failure strikes in the middle of looking."""
    before = port.struck
    try:
        sound(store)
    except (OSError, AssertionError):
        if port.struck == before:
            raise
        sound(store)


@pytest.mark.parametrize(("fsync", "code"), [("never", errno.EIO), ("always", errno.ENOSPC)])
def test_every_call_fails_once(memory: Path, code: int, fsync: str) -> None:
    struck, nth = set(), 0
    while True:
        nth += 1
        directory = memory / str(nth)
        directory.mkdir()
        port = FailingOs(nth, code)
        script(directory, port, fsync)
        shutil.rmtree(directory)
        if not port.struck:
            break
        struck.add(port.struck)
    wanted = {"open", "close", "lock", "pread", "pwrite", "fallocate", "size", "unlink", "rename", "files", "room"}
    assert struck >= wanted | ({"fdatasync", "fsync"} if fsync == "always" else set())
