"""What a service tells of the members is told whole, and nonsense is refused."""

from __future__ import annotations

import json

import pytest

from hicache_ray.storage.members import Member, Members, MembersConfig
from hicache_ray.storage.membership import ALONE, Membership, pack_membership, unpack_membership
from hicache_ray.storage.peers import ShardConfig
from hicache_ray.storage.wire import WireError
from tests.storage.conftest import FakeClock


def said(clock: FakeClock) -> Membership:
    members = Members(clock, MembersConfig(misses=1))
    for i in range(4):
        members.join(Member(f"n{i}", f"{i:016x}", f"10.0.0.{i}:7000", f"rack{i % 2}"))
        clock.advance(members.config.settle_s)
    members.missed("n2")
    return Membership("n1", members.alive(), "secret", ShardConfig("home", 2), 3)


def test_round_trip(clock: FakeClock) -> None:
    told = said(clock)
    found = unpack_membership(pack_membership(told), 7)
    assert found is not None
    assert (found.here, found.token, found.shard, found.streams) == ("n1", "secret", ShardConfig("home", 2), 3)
    assert (found.view.version, found.view.alive, found.view.before) == (7, told.view.alive, told.view.before)
    assert found.view.known == {f"n{i}:{i:016x}" for i in range(4)}
    assert [member.node for member in found.view.alive] == ["n0", "n1", "n3"]
    assert not found.alone


def test_alone(clock: FakeClock) -> None:
    assert unpack_membership(ALONE, 1) is None
    members = Members(clock)
    members.join(Member("n1", "1"))
    assert Membership("n1", members.alive()).alone
    assert not Membership("n0", members.alive()).alone


def test_the_token_is_not_shown(clock: FakeClock) -> None:
    assert "secret" not in repr(said(clock))


@pytest.mark.parametrize(
    "change",
    [
        {"alive": [99]}, {"alive": [-1]}, {"alive": 3}, {"before": [["x"]]}, {"members": [["n0"]]},
        {"members": [["n0", "1", "no port", ""]]}, {"members": [["", "1", "", ""]]},
        {"members": [[1, "1", "", ""]]}, {"shard": {"placement": "moon"}}, {"shard": {"spoon": 1}},
        {"streams": "many"}, {"known": 1},
    ],
)  # fmt: skip
def test_nonsense(clock: FakeClock, change: dict[str, object]) -> None:
    body = json.loads(pack_membership(said(clock)))
    with pytest.raises(WireError, match="nonsense about the members"):
        unpack_membership(json.dumps({**body, **change}).encode(), 1)


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff", b'{"here": 1}', b"[" * 100_000])
def test_what_is_no_object(raw: bytes) -> None:
    with pytest.raises(WireError):
        unpack_membership(raw, 1)
