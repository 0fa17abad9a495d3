"""The shared-memory arena of one node: settings, address, and the owner's side (index + segment + the directories that hold them)."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hicache_ray.errors import ConfigError
from hicache_ray.storage.index import ArenaIndex, Limits
from hicache_ray.storage.owned import OwnedDirectory, sweep
from hicache_ray.storage.segment import Segment, data_offset, huge_pages_allowed, require_room
from hicache_ray.storage.slabs import SlabMap, default_slab_bytes

SOCKET = "arena.sock"
HUGE_PAGES = ("auto", "off")
PENDING_LEAST = 64 << 20
PREFAULT = ("background", "start", "off")
_SOCKET_PATH_BYTES = 107  # sockaddr_un, without the final zero


@dataclass(frozen=True)
class ArenaConfig:
    """Settings of one arena.

    ``name``: names the directories, one living store per name and directory. ``size_bytes``: cap on object bytes (rounded down to whole
    slabs; 0.2 % more is used for generation words). ``directory``: where the memory lives; on a disk it is the file-backed fallback.
    ``socket_dir``: where the socket lives, ``directory`` unless set. ``lease_s``, ``hold_s``: longest time a reader, a writer may take.
    ``slab_bytes``: unit that moves between size classes. ``prefault``: ``background | start | off``. ``io_timeout_s``: longest time that
    half a frame may take to arrive. ``start_timeout_s``: how long to wait for a dying predecessor of the same name. ``pending_bytes``: most
    bytes that all writers together may hold reserved, a quarter of the size (64 MiB at least) unless set; a reserve beyond it is refused,
    but for a writer that is alone. ``tenant_bytes``: most bytes of a tenant, by the name in its namespaces' records; "" is whatever
    nobody described.
    ``huge_pages``: ``auto | off``. ``back_s``: longest time that a call waits for what lies behind the arena.
    """

    name: str
    size_bytes: int
    directory: str = "/dev/shm"
    socket_dir: str | None = None
    lease_s: float = 10.0
    hold_s: float = 30.0
    slab_bytes: int | None = None
    prefault: str = "background"
    prefault_threads: int = 2
    max_connections: int = 64
    io_timeout_s: float = 5.0
    start_timeout_s: float = 10.0
    pending_bytes: int | None = None
    tenant_bytes: Mapping[str, int] = field(default_factory=dict)
    huge_pages: str = "auto"
    back_s: float = 1.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", self.name):
            raise ConfigError(f"storage.name {self.name!r} must be 1 to 40 letters, digits, '_', '.' or '-'")
        if self.prefault not in PREFAULT:
            raise ConfigError(f"storage.prefault {self.prefault!r} must be one of {', '.join(PREFAULT)}")
        if self.huge_pages not in HUGE_PAGES:
            raise ConfigError(f"storage.huge_pages {self.huge_pages!r} must be one of {', '.join(HUGE_PAGES)}")
        for setting in ("size_bytes", "lease_s", "hold_s", "prefault_threads", "max_connections", "io_timeout_s", "back_s"):
            if getattr(self, setting) <= 0:
                raise ConfigError(f"storage.{setting} must be positive, got {getattr(self, setting)}")
        for tenant, cap in self.tenant_bytes.items():
            if cap <= 0:
                raise ConfigError(f"the cap of tenant {tenant!r} must be positive, got {cap}; see storage.tenant_bytes")
        if self.pending_bytes is not None and self.pending_bytes <= 0:
            raise ConfigError(f"storage.pending_bytes must be positive, got {self.pending_bytes}")
        path = self.socket_path
        if len(str(path).encode()) > _SOCKET_PATH_BYTES:
            raise ConfigError(f"the socket path {path} is longer than {_SOCKET_PATH_BYTES} bytes; set storage.socket_dir to a short one")

    @property
    def limits(self) -> Limits:
        pending = self.pending_bytes or max(self.size_bytes // 4, min(self.size_bytes, PENDING_LEAST))
        return Limits(self.lease_s, self.hold_s, pending, self.tenant_bytes)

    @property
    def socket_path(self) -> Path:
        """Depends on the name only, so that clients find a restarted service."""
        return Path(self.socket_dir or self.directory) / f"hicache_ray-{self.name}" / SOCKET


@dataclass(frozen=True)
class ArenaAddress:
    """Where a service listens. ``incarnation``: 16 hex digits, new with every start."""

    socket: str
    incarnation: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, str]) -> ArenaAddress:
        return cls(record["socket"], record["incarnation"])


class Arena:
    """Everything the owning process holds: two locked directories, the segment, the index. Not thread-safe but for :meth:`close`."""

    def __init__(self, config: ArenaConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Sweeps dead incarnations, then takes the name, the room and the memory. Raises ConfigError and leaves nothing behind."""
        self.config = config
        self.incarnation = secrets.token_hex(8)
        directory, socket_dir = Path(config.directory), config.socket_path.parent.parent
        for swept in {directory, socket_dir}:
            sweep(swept)
        huge = config.huge_pages == "auto" and huge_pages_allowed()
        require_room(directory, data_offset(config.size_bytes) + config.size_bytes)
        slabs = SlabMap(config.size_bytes, config.slab_bytes or default_slab_bytes(config.size_bytes))
        self._owned = [OwnedDirectory.create(socket_dir, config.name, config.start_timeout_s)]
        try:
            self._owned.append(OwnedDirectory.create(directory, f"{config.name}-{self.incarnation}"))
            self.segment = Segment.create(self._owned[1].path / "segment-0", slabs.capacity_bytes, huge)
        except BaseException:
            self.close()
            raise
        first_id = int(self.incarnation[:8], 16) << 31 | 1
        self.index = ArenaIndex(slabs, self.segment.generations, clock, config.limits, first_id)
        if config.prefault != "off":
            self.segment.prefault(config.prefault_threads)
        if config.prefault == "start":
            self.segment.wait_prefaulted()

    @property
    def address(self) -> ArenaAddress:
        return ArenaAddress(str(self.config.socket_path), self.incarnation)

    def close(self) -> None:
        """Remove the files. Mapped clients keep their memory until they let go. Idempotent."""
        if hasattr(self, "segment"):
            self.segment.close()
        for owned in self._owned:
            owned.close()
