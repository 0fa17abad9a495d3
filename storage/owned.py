"""Directories that die with their owner.

Everything this package leaves in a file system (segments, sockets) lies in a directory ``hicache_ray-...`` of mode 0700 on which the owner
holds an flock. The kernel drops the lock with the process, however it ends, so whoever gets the lock knows that the owner is dead.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from hicache_ray.errors import ConfigError

PREFIX = "hicache_ray-"
_POLL_S = 0.05


@dataclass
class OwnedDirectory:
    path: Path
    _lock: int | None  # file descriptor of the directory itself

    @classmethod
    def create(cls, parent: Path, name: str, wait_s: float = 0.0) -> OwnedDirectory:
        """Make ``parent / (PREFIX + name)`` and lock it; a dead owner's leftovers under that name are removed first.

        While a living process owns the name, tries again for ``wait_s`` seconds (a killed predecessor may need a moment to vanish).
        Raises ConfigError.
        """
        if not parent.is_dir():
            raise ConfigError(f"{parent} is not a directory; create it, or choose another storage.directory or storage.socket_dir")
        path = parent / (PREFIX + name)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                owned = cls._try(path)
            except OSError as error:
                raise ConfigError(
                    f"cannot create {path}: {error.strerror}; choose another storage.directory or storage.socket_dir"
                ) from error
            if owned is not None:
                return owned
            if time.monotonic() >= deadline:
                raise ConfigError(f"{path} belongs to a store that is running; stop it or choose another storage.name")
            time.sleep(_POLL_S)

    @classmethod
    def _try(cls, path: Path) -> OwnedDirectory | None:
        if path.exists() and not _remove_if_dead(path):
            return None
        try:
            path.mkdir(mode=0o700)
            lock = _lock(path)
        except (FileExistsError, FileNotFoundError):
            return None  # another process was faster, or swept it before we had the lock
        return cls(path, lock) if lock is not None else None

    def close(self) -> None:
        """Remove the directory with what is in it. Idempotent."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def sweep(directory: str | Path) -> list[str]:
    """Remove what dead owners left in ``directory``; returns the names removed. What lives, or belongs to another user, is left alone."""
    found = []
    for path in sorted(Path(directory).glob(PREFIX + "*")):
        if path.is_dir() and not path.is_symlink() and path.lstat().st_uid == os.geteuid() and _remove_if_dead(path):
            found.append(path.name)
    return found


def _remove_if_dead(path: Path) -> bool:
    try:
        lock = _lock(path)
    except FileNotFoundError:
        return True
    if lock is None:
        return False
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
    return True


def _lock(path: Path) -> int | None:
    """Lock the directory; None where somebody else holds the lock, or where ``path`` has become another directory meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None
