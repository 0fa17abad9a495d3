"""Spare slots whose time ends, or whose put ends, at the wrong moment; and services that answer nonsense about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from hicache_ray.errors import StoreTimeout
from hicache_ray.storage import ArenaClient, ArenaConfig, ArenaService
from hicache_ray.storage.movers import Piece
from hicache_ray.storage.serving import Handler
from hicache_ray.storage.wire import Kind, Reader, WireError
from tests.storage.conftest import FakeClock
from tests.storage.objects import PAGE, TIMEOUT_S, get, name, page, present, put


@pytest.fixture
def config(config: ArenaConfig) -> ArenaConfig:
    """With room for one spare."""
    return replace(config, size_bytes=128 * PAGE)


@contextmanager
def _within_the_copy(client: ArenaClient, act: Callable[[], object]) -> Iterator[None]:
    """Something happens once, when a put has begun, before its bytes are copied."""
    copier, todo = client._copier, [act]
    run_one = copier.run_one

    def later(piece: Piece, of_source: bool, stop: Callable[[], bool]) -> int | None:
        if of_source and todo:
            todo.pop()()
        return run_one(piece, of_source, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copier, "run_one", later)
        yield


def test_a_put_that_outlives_its_spare_does_not_outlive_a_removal(config: ArenaConfig, connect: Callable[..., ArenaClient]) -> None:
    """It was being written when it was removed; nobody remembers that any more when its writer goes on."""
    clock = FakeClock()
    with ArenaService(config, clock) as service:
        client, other = (connect(service.address, clock=clock) for _ in range(2))
        for number in range(3):
            put(client, [number])

        def away_for_long() -> None:
            clock.advance(11.0)
            other.drop([name(7)], TIMEOUT_S)

        with _within_the_copy(client, away_for_long):
            assert client.put([name(7)], [page(7)], 60.0) == 0
        assert present(client, [7]) == set()
        service.check()


def test_a_put_without_time_asks_nobody_and_keeps_its_spare(
    service: ArenaService, client: ArenaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        put(client, [number])
    with pytest.raises(StoreTimeout):
        client.put([name(3)], [page(3)], 0.0)
    asked: list[str] = []
    answer = service.answer

    def noted(kind: int, reader: Reader, handler: Handler) -> bytes:
        asked.append(Kind(kind).name)
        return answer(kind, reader, handler)

    monkeypatch.setattr(service, "answer", noted)
    assert put(client, [3]) == 1
    assert asked == ["WRITE"]
    assert get(client, [3]) == {3}


@pytest.mark.parametrize(("kind", "nonsense"), [(Kind.WRITE, b""), (Kind.WRITE, b"\7"), (Kind.WRITE, b"\0spare"), (Kind.SEAL, b"\7")])
def test_an_answer_that_is_none(
    service: ArenaService, client: ArenaClient, monkeypatch: pytest.MonkeyPatch, kind: Kind, nonsense: bytes
) -> None:
    put(client, [0])
    for number in range(1, 3 if kind == Kind.WRITE else 1):
        put(client, [number])
    answer = service.answer
    monkeypatch.setattr(service, "answer", lambda asked, *rest: nonsense if asked == kind else answer(asked, *rest))
    with pytest.raises(WireError):
        put(client, [3])


@pytest.mark.parametrize(("seconds", "stored"), [(8.9, 1), (9.1, 0)])
def test_a_copy_ends_long_before_its_slot_is_anybodys(
    config: ArenaConfig, connect: Callable[..., ArenaClient], seconds: float, stored: int
) -> None:
    """A writer that is held up within a slice looks at the clock afterwards only."""
    clock = FakeClock()
    with ArenaService(config, clock) as service:
        client = connect(service.address, clock=clock)
        for number in range(3):
            put(client, [number])
        with _within_the_copy(client, lambda: clock.advance(seconds)):
            assert client.put([name(3)], [page(3)], 60.0) == stored
        assert service.stats().spare_bytes == PAGE
