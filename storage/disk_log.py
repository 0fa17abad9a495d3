"""A small file beside the segments that is replaced as a whole, in room that is kept for it: a full disk has none to spare.

hicache.forgotten       the file
hicache.forgotten.new   the next one, until it is whole
hicache.heard           empty; its date says as of when its node has heard of all that it was to forget
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from hicache_ray.storage.disk_io import DiskOs, read_upto, up, write_all

LOG, LOG_TEMPORARY, HEARD = "hicache.forgotten", "hicache.forgotten.new", "hicache.heard"


def log_room(most: int, files: Mapping[str, int]) -> int:
    """Bytes of the cap that the file, of ``most`` bytes at most, takes with its successor. ``files``: what is there, by name."""
    return up(most) + max(up(most), up(files.get(LOG, 0))) if most else 0


class DiskLog:
    """Not thread-safe. ``sync``: what was written survives a loss of power."""

    def __init__(self, port: DiskOs, directory: str, sync: bool) -> None:
        self._port, self._directory, self._sync = port, directory, sync

    def read(self) -> tuple[bytes, float] | None:
        """(content, when it was written, of time.time()); None where there is no file. Raises OSError."""
        path = os.path.join(self._directory, LOG)
        try:
            descriptor = self._port.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            data = memoryview(bytearray(self._port.size(descriptor)))
            return bytes(data[: read_upto(self._port, descriptor, data, 0)]), self._port.written_at(path)
        finally:
            self._close(descriptor)

    def replace(self, data: bytes) -> None:
        """Whole, or not at all. Raises OSError."""
        path, temporary = (os.path.join(self._directory, name) for name in (LOG, LOG_TEMPORARY))
        try:
            descriptor = self._port.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                write_all(self._port, descriptor, memoryview(data), 0)
                if self._sync:
                    self._port.fdatasync(descriptor)
            finally:
                self._close(descriptor)
            self._port.rename(temporary, path)
        except OSError:
            with suppress(OSError):  # the room for it is kept anyway
                self._port.unlink(temporary)
            raise
        if self._sync:
            descriptor = self._port.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self._port.fsync(descriptor)
            finally:
                self._close(descriptor)

    def heard_at(self) -> float | None:
        """Of time.time(); None where it was never said. Raises OSError."""
        try:
            return self._port.written_at(os.path.join(self._directory, HEARD))
        except FileNotFoundError:
            return None

    def begin(self, at: float) -> None:
        """As :meth:`hear`, with or without a file. Nothing else may be called meanwhile. Raises OSError."""
        path, temporary = (os.path.join(self._directory, name) for name in (HEARD, LOG_TEMPORARY))
        self._close(self._port.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        self._port.date(temporary, at)
        self._port.rename(temporary, path)

    def hear(self, at: float) -> None:
        """Raises OSError."""
        self._port.date(os.path.join(self._directory, HEARD), at)

    def _close(self, descriptor: int) -> None:
        """A descriptor is gone whatever close says."""
        with suppress(OSError):
            self._port.close(descriptor)
