"""What a storage service tells its clients of the nodes of its cluster: who is there and alive, and how to talk to them. As JSON.

    here     this node's name                        token    of the tcp plane
    shard    the fields of a ShardConfig             streams  to each other node, for a large read
    members  [node, incarnation, tcp address, label] of each that is named below        known   names of all holders
    alive    numbers of those that are alive         before   the same lists of shortly before

A service that knows of no cluster says ``{}``. The token travels in this message because only processes of the same user are answered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hicache_ray.errors import ConfigError, StoreError
from hicache_ray.storage.members import Member, View
from hicache_ray.storage.peers import ShardConfig
from hicache_ray.storage.tcp import TcpAddress
from hicache_ray.storage.wire import WireError

ALONE = b"{}"
MOST_MEMBERS = 1024
_MOST_CHARACTERS = 256  # of each field of a member


@dataclass(frozen=True, eq=False)
class Membership:
    """``view``: as the service of the node ``here`` sees it."""

    here: str
    view: View
    token: str = field(default="", repr=False)
    shard: ShardConfig = field(default_factory=ShardConfig)
    streams: int = 2

    @property
    def alone(self) -> bool:
        """Is there nobody else to ask?"""
        return [member.node for member in self.view.alive] == [self.here]


def require_member(member: Member) -> None:
    """Raises ConfigError for one that cannot be told, or not be reached."""
    fields = (member.node, member.incarnation, member.address, member.label)
    if not all(isinstance(one, str) and len(one) <= _MOST_CHARACTERS for one in fields) or not member.node or not member.incarnation:
        raise ConfigError(f"a member is a node, an incarnation, host:port and a label of at most {_MOST_CHARACTERS} letters, not {member}")
    if member.address:
        TcpAddress.parse(member.address)


def pack_membership(said: Membership) -> bytes:
    numbers: dict[Member, int] = {}

    def listed(members: Sequence[Member]) -> list[int]:
        return [numbers.setdefault(member, len(numbers)) for member in members]

    alive, before = listed(said.view.alive), [listed(members) for members in said.view.before]
    members = [[member.node, member.incarnation, member.address, member.label] for member in numbers]
    body = {"here": said.here, "token": said.token, "shard": asdict(said.shard), "streams": said.streams, "members": members}
    return json.dumps({**body, "alive": alive, "before": before, "known": sorted(said.view.known)}).encode()


def unpack_membership(raw: bytes, version: int) -> Membership | None:
    """``version``: of the view, as whoever reads it counts. None where the service knows of no cluster. Raises WireError."""
    try:
        body = json.loads(raw)
        if body == {}:
            return None
        members = [_member(*fields) for fields in body["members"]]
        before = tuple(_chosen(members, indices) for indices in body["before"])
        known = frozenset(map(str, body["known"]))
        view = View(version, _chosen(members, body["alive"]), before, known)
        return Membership(str(body["here"]), view, str(body["token"]), ShardConfig(**body["shard"]), int(body["streams"]))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError, ConfigError) as error:
        raise WireError(f"the arena's service says nonsense about the members of its cluster: {error}") from error


def _member(*fields: Any) -> Member:
    member = Member(*fields)
    require_member(member)
    return member


def _chosen(members: Sequence[Member], indices: Sequence[int]) -> tuple[Member, ...]:
    if any(i < 0 for i in indices):
        raise ValueError("a member has a negative number")
    return tuple(members[i] for i in indices)


def require_reachable(member: Member) -> None:
    """Raises StoreError."""
    if not member.address:
        raise StoreError(f"node {member.node} has no address on the tcp plane; give it a token")
