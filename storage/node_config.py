"""Settings of the storage of one node, and the address by which the cluster knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from hicache_ray.errors import ConfigError
from hicache_ray.storage.announcer import AnnouncerConfig
from hicache_ray.storage.arena import ArenaConfig
from hicache_ray.storage.disk_config import DiskConfig
from hicache_ray.storage.members import Member, MembersConfig
from hicache_ray.storage.membership import require_member
from hicache_ray.storage.peers import ShardConfig
from hicache_ray.storage.repair import RepairConfig
from hicache_ray.storage.tcp import TcpClientConfig, TcpConfig

_ANY = ("", "0.0.0.0", "::")  # what a socket can be bound to, and nobody can connect to


@dataclass(frozen=True)
class NodeConfig:
    """``node``: lasting name of the machine in the cluster. ``token``: of the cluster's tcp plane; empty: this node speaks to no other.
    ``host``, ``port``: where the others reach it; port 0: the system picks one. ``streams``: sockets that a large read from one other
    node is spread over. ``max_connections``, ``inflight_bytes``: of the tcp plane. ``label``: failure domain. ``shard``: where bytes go;
    the same on every node. ``flight_port``: of an Arrow Flight endpoint, 0: the system picks one, None: none. ``home_entries``: most
    entries of this node's part of the directory. ``disk``: what lies behind the arena, None: nothing; ``write_behind_bytes``: of the
    objects that wait to be written there, at most. ``records``: described from the start, by their digests: what says whose a space is
    must be known before its first byte, or the cap of its tenant holds too late. ``repair``: of second copies that are lost.
    """

    node: str
    arena: ArenaConfig
    token: str = field(default="", repr=False)
    host: str = "127.0.0.1"
    port: int = 0
    streams: int = 2
    max_connections: int = 1024
    inflight_bytes: int = 512 << 20
    label: str = ""
    shard: ShardConfig = field(default_factory=ShardConfig)
    members: MembersConfig = field(default_factory=MembersConfig)
    announcer: AnnouncerConfig = field(default_factory=AnnouncerConfig)
    home_entries: int = 1 << 20
    flight_port: int | None = None
    disk: DiskConfig | None = None
    write_behind_bytes: int = 256 << 20
    records: Mapping[bytes, Mapping[str, str]] = field(default_factory=dict)
    repair: RepairConfig = field(default_factory=RepairConfig)

    def __post_init__(self) -> None:
        require_member(Member(self.node, "0", "", self.label))
        TcpClientConfig(streams=self.streams)
        if self.write_behind_bytes <= 0:
            raise ConfigError(f"storage.write_behind_bytes must be positive, got {self.write_behind_bytes}")
        if self.token:
            self.tcp  # noqa: B018  it says what is wrong
            if self.host in _ANY:
                raise ConfigError(f"host {self.host!r} tells the other nodes nothing; set the address by which they reach this one")
        elif self.flight_port is not None:
            raise ConfigError("a Flight endpoint needs a token; set the token of the cluster, or leave flight_port out")

    @property
    def tcp(self) -> TcpConfig:
        return TcpConfig(self.token, self.host, self.port, self.max_connections, self.inflight_bytes)


@dataclass(frozen=True)
class NodeAddress:
    """``socket``: for the processes of the machine; ``tcp``: ``host:port`` for the other nodes, empty where there are none."""

    socket: str
    incarnation: str
    node: str
    tcp: str = ""
    label: str = ""

    @property
    def member(self) -> Member:
        return Member(self.node, self.incarnation, self.tcp, self.label)

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, str]) -> NodeAddress:
        return cls(record["socket"], record["incarnation"], record["node"], record["tcp"], record["label"])
