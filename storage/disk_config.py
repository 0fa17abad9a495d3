"""Settings of the disk tier."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_ray.errors import ConfigError
from hicache_ray.storage.disk_io import BLOCK

DIRECT = ("auto", "on", "off")
FSYNC = ("never", "batch", "always")
_SEGMENT_BYTES = 64 << 20
_LEAST_SEGMENTS = 8


@dataclass(frozen=True)
class DiskConfig:
    """Settings of one disk store. Sizes in bytes, times in seconds.

    ``directory``: it must exist; one living store per directory. ``size_bytes``: cap on what all files in it take, ours and others'.
    ``segment_bytes``: data per segment file, and so the longest object (64 MiB, or an eighth of a smaller store, unless set).
    ``direct``: ``auto`` uses direct I/O where the file system has it, else the page cache; ``on`` refuses to start without it.
    ``fsync``: ``never``: what is visible survives the process; ``batch``: one sync per put, what a put reported visible survives a loss of
    power; ``always``: also a sync between an object's bytes and its record, so that nothing torn is visible even for a moment after one.
    ``io_threads``: reads and writes at once, each through ``staging_bytes`` of aligned memory. ``lease_s``: longest time a reader may take;
    ``lease_bytes``: memory of open leases. ``retry_s``: how long writes stay off after the disk has refused one.
    """

    directory: str
    size_bytes: int
    segment_bytes: int | None = None
    direct: str = "auto"
    fsync: str = "batch"
    io_threads: int = 8
    staging_bytes: int = 2 << 20
    lease_s: float = 10.0
    lease_bytes: int = 256 << 20
    retry_s: float = 30.0

    def __post_init__(self) -> None:
        for setting, legal in (("direct", DIRECT), ("fsync", FSYNC)):
            if getattr(self, setting) not in legal:
                raise ConfigError(f"storage.disk.{setting} {getattr(self, setting)!r} must be one of {', '.join(legal)}")
        for setting in ("size_bytes", "io_threads", "staging_bytes", "lease_s", "lease_bytes", "retry_s"):
            if getattr(self, setting) <= 0:
                raise ConfigError(f"storage.disk.{setting} must be positive, got {getattr(self, setting)}")
        if self.staging_bytes % BLOCK:
            raise ConfigError(f"storage.disk.staging_bytes {self.staging_bytes} must be a multiple of {BLOCK}")
        if self.segment_bytes is not None and (self.segment_bytes < BLOCK or self.segment_bytes % BLOCK):
            raise ConfigError(f"storage.disk.segment_bytes {self.segment_bytes} must be a positive multiple of {BLOCK}")

    @property
    def segment(self) -> int:
        """Data bytes of a segment."""
        return self.segment_bytes or max(min(_SEGMENT_BYTES, self.size_bytes // _LEAST_SEGMENTS // BLOCK * BLOCK), BLOCK)
