"""One end of a socket: looking for what arrives before going to sleep."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from hicache_ray.storage import ArenaClient, ArenaService, frames
from hicache_ray.storage.client import WATCH_S
from hicache_ray.storage.frames import FrameSocket, now
from hicache_ray.storage.wire import Frame, Kind, encode
from tests.storage.objects import present, put


@pytest.fixture
def ends() -> Iterator[tuple[FrameSocket, socket.socket]]:
    one, other = socket.socketpair()
    framed = FrameSocket(one, 0)
    yield framed, other
    framed.close()
    other.close()


def test_who_watches_sees_what_is_there_and_takes_nothing(ends: tuple[FrameSocket, socket.socket]) -> None:
    framed, other = ends
    assert not framed.watch(0.001)
    other.sendall(encode(Kind.PING, 7, b"page"))
    assert framed.watch(60.0)
    assert framed.receive(now() + 60.0) == Frame(Kind.PING, 7, b"page")
    assert not framed.watch(0.0)


def test_who_watches_sees_that_the_other_end_hangs_up(ends: tuple[FrameSocket, socket.socket]) -> None:
    framed, other = ends
    other.close()
    assert framed.watch(60.0)
    assert framed.receive(now() + 60.0) is None


def test_only_a_lookup_is_watched_for(service: ArenaService, client: ArenaClient, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[float] = []
    watch = frames.FrameSocket.watch

    def noted(framed: FrameSocket, seconds: float) -> bool:
        watched.append(seconds)
        return watch(framed, seconds)

    monkeypatch.setattr(frames.FrameSocket, "watch", noted)
    assert put(client, [1, 2]) == 3
    assert present(client, [1, 2, 3]) == {1, 2}
    assert watched == [WATCH_S]
