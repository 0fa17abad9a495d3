"""Puts and gets of one object go another way than those of several; nobody sees a difference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ray.errors import StoreTimeout
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService, ClientConfig
from hicache_ray.storage.copying import Copier, checksum
from hicache_ray.storage.movers import Batch, Piece
from tests.storage.objects import PAGE, TIMEOUT_S, get, name, page, put

SIZES = st.sampled_from([0, 1, 240, 241, 1024, 1025, PAGE])
OTHER = 999  # an object beside the one that is spoken of


def _put(client: ArenaClient, alone: bool, number: int, size: int) -> int:
    numbers = [number] if alone else [number, OTHER]
    return put(client, numbers, size) & 1


def _get(client: ArenaClient, alone: bool, number: int, size: int) -> tuple[int, bytes]:
    numbers = [number] if alone else [number, OTHER]
    targets = [np.zeros(size, np.uint8) for _ in numbers]
    return client.get([name(n) for n in numbers], targets, TIMEOUT_S) & 1, targets[0].tobytes()


STEPS = st.lists(st.tuples(st.sampled_from(["put", "get", "damage", "drop"]), st.integers(0, 3), SIZES), max_size=25)


def test_both_ways_answer_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("s")
    configs = [ArenaConfig(f"twin-{n}", 64 * PAGE, str(folder), slab_bytes=PAGE) for n in (0, 1)]
    with ArenaService(configs[0]) as one, ArenaService(configs[1]) as other:
        clients = [ArenaClient(service.address) for service in (one, other)]

        @given(steps=STEPS)
        @settings(max_examples=40, derandomize=True, deadline=None)
        def same(steps: list[tuple[str, int, int]]) -> None:
            for client in clients:
                client.clear(TIMEOUT_S)
            for what, number, size in steps:
                answers = [_do(client, client is clients[0], what, number, size) for client in clients]
                assert answers[0] == answers[1]
            failures = [client.stats(TIMEOUT_S).checksum_failures for client in clients]
            assert failures[0] == failures[1]
            assert [client.stats(TIMEOUT_S).leases for client in clients] == [0, 0]

        try:
            same()
        finally:
            for client in clients:
                client.close()


def _do(client: ArenaClient, alone: bool, what: str, number: int, size: int) -> object:
    if what == "put":
        return _put(client, alone, number, size)
    if what == "get":
        hit, data = _get(client, alone, number, size)
        return hit, data if hit else b""  # what stands in the target of a miss is nobody's business
    return client.damage(name(number)) if what == "damage" else client.drop([name(number)], TIMEOUT_S)


def test_what_another_writer_holds_is_not_visible(service: ArenaService, client: ArenaClient) -> None:
    service.node.reserve([name(1)], [PAGE], service.node.owner(), 5.0)
    assert put(client, [1]) == 0
    assert get(client, [1]) == set()


def test_a_deadline_within_the_copy_of_one(service: ArenaService, connect: Callable[..., ArenaClient]) -> None:
    """A put raises and leaves nothing; a get is a miss, and its lease is given back."""
    clock = _Later()
    client = connect(service.address, ClientConfig(slice_bytes=PAGE // 4), clock=clock)
    other = connect(service.address)
    put(other, [1])
    client.ping(TIMEOUT_S)
    clock.step = 0.01
    assert client.get([name(1)], [np.zeros(PAGE, np.uint8)], 0.045) == 0
    with pytest.raises(StoreTimeout):
        client.put([name(2)], [page(2)], 0.045)
    assert other.stats(TIMEOUT_S).leases == 0
    assert get(other, [1, 2]) == {1}


class _Later:
    """A clock on which every look takes ``step`` seconds."""

    def __init__(self) -> None:
        self.now, self.step = 100.0, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.mark.parametrize("kernel", ["auto", "off"])
@pytest.mark.parametrize("size", [0, 1, 240, 241, 5000, 300_000])
def test_the_copy_of_one(kernel: str, size: int) -> None:
    copier = Copier(2, 4096, kernel)
    try:
        assert copier.warm_up(60.0) == (kernel == "auto")
        for number in (1, 2):  # the columns are used again
            source, target = page(number, size), np.zeros(size, np.uint8)
            piece = Piece(source.ctypes.data, target.ctypes.data, size)
            assert copier.run_one(piece, bool(number % 2), lambda: False) == checksum(source)
            assert (source == target).all()
            sums = copier.run(Batch.of([source], [target]), lambda: False)
            assert sums.listed() == [checksum(source)]
        assert copier.run_one(piece, True, lambda: True) is None
    finally:
        copier.close()
