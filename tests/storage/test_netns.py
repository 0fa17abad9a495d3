"""Two nodes, as far as the network knows: a server and a client in namespaces of their own, with a cable that can be cut."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.storage.netns import COUNT, Cable, Program, missing, running


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    if reason := missing():
        pytest.skip(reason)
    joined = Cable()
    try:
        yield joined
    finally:
        joined.close()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert joined.server not in left
    assert joined.client not in left


@pytest.fixture(scope="module")
def client(cable: Cable) -> Iterator[Program]:
    """Beside a server with COUNT objects of SIZE bytes."""
    with running(cable.server, "serve") as server, running(cable.client, "ask", json.dumps(server.hear())) as asking:
        yield asking


def test_a_round_trip_between_two_addresses(client: Program) -> None:
    client.tell("get 20")
    assert client.hear() == COUNT
    client.tell("put 20")
    assert client.hear() == COUNT // 2


def test_the_cable_is_cut_in_the_middle_of_a_read(client: Program, cable: Cable) -> None:
    """The call ends by its own deadline (the system would go on trying for a quarter of an hour), and the next one finds the way again."""
    client.tell("middle 1.5")
    assert client.hear() == "in the middle"
    cable.set("down")
    client.tell("go on")
    assert client.hear() < COUNT
    client.tell("get 0.5")
    assert "StoreTimeout" in client.hear()
    cable.set("up")
    client.tell("get 20")
    assert client.hear() == COUNT
