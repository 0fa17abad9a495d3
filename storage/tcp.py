"""Addresses and settings of the tcp plane, and the handshake by which both ends prove that they know the token.

    server > CHALLENGE nonce 32s
    client > PROOF     nonce 32s | HMAC-SHA256(token, "client" | challenge | nonce)
    server > WELCOME   HMAC-SHA256(token, "server" | challenge | nonce) | incarnation 8s

The token itself is never sent, and a server says nothing about itself before the client has proved that it knows it. What follows is
neither signed nor encrypted: the plane is for the network of a cluster, not for the open internet.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from hicache_ray.errors import ConfigError
from hicache_ray.storage.loading import KERNELS

NONCE_BYTES = MAC_BYTES = 32
INCARNATION_BYTES = 8


@dataclass(frozen=True)
class TcpAddress:
    """Where a server listens. ``str()`` and :meth:`parse` are inverse; an IPv6 host stands in brackets there."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> TcpAddress:
        """``host:port``. Raises ConfigError."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{text!r} is not an address; write host:port, e.g. 10.0.0.7:7070")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def to_dict(self) -> dict[str, str | int]:
        return {"host": self.host, "port": self.port}

    @classmethod
    def from_dict(cls, fields: Mapping[str, str | int]) -> TcpAddress:
        return cls(str(fields["host"]), int(fields["port"]))


@dataclass(frozen=True)
class TcpConfig:
    """Of a server. ``port`` 0: the system picks one. ``inflight_bytes``: most bytes of all puts under way together. ``io_timeout_s``: how
    long a peer may be silent in the middle of a frame or of the handshake. ``request_s``: most seconds that one request may take,
    whatever it asks for. ``buffer_bytes``: of each socket and direction; 0 leaves it to the system.
    """

    token: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 0
    max_connections: int = 64
    inflight_bytes: int = 512 << 20
    io_timeout_s: float = 5.0
    request_s: float = 60.0
    buffer_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        require_token(self.token)
        if self.max_connections < 1 or self.inflight_bytes < 1:
            raise ConfigError("a tcp server needs room for at least one connection and one byte; raise max_connections or inflight_bytes")


@dataclass(frozen=True)
class TcpClientConfig:
    """``streams``: sockets that one large get or put is spread over. ``connections``: most sockets of this client. ``lease_bytes``: most
    bytes of one lease, because a client on another node keeps a copy of them. ``backoff_s``, ``backoff_most_s``: how long a failed server
    is left alone. ``kernel``: ``auto | off``, whether large transfers use the compiled loops.
    """

    streams: int = 2
    connections: int = 8
    lease_bytes: int = 256 << 20
    backoff_s: float = 0.5
    backoff_most_s: float = 2.0
    buffer_bytes: int = 4 << 20
    kernel: str = "auto"

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ConfigError(f"kernel is {self.kernel!r}; choose from {', '.join(KERNELS)}")
        if not 1 <= self.streams <= self.connections:
            raise ConfigError(f"streams is {self.streams}; choose 1 to {self.connections} (connections)")


def require_token(token: str) -> None:
    """Raises ConfigError."""
    if not token:
        raise ConfigError("the tcp plane needs a token; set the same secret on every node")


def proof(token: str, who: str, challenge: bytes, nonce: bytes) -> bytes:
    """What only one who knows the token can say; ``who`` is ``client`` or ``server``, so that neither can echo the other."""
    return hmac.new(token.encode(), who.encode() + challenge + nonce, hashlib.sha256).digest()


def proves(token: str, who: str, challenge: bytes, nonce: bytes, mac: bytes) -> bool:
    return hmac.compare_digest(proof(token, who, challenge, nonce), mac)
