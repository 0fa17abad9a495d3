"""What tests of one service look into: what it is asked, and the moment before a put copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hicache_ray.storage import ArenaClient, ArenaService
from hicache_ray.storage.movers import Piece
from hicache_ray.storage.serving import Handler
from hicache_ray.storage.wire import Kind, Reader


@contextmanager
def during_the_copy(client: ArenaClient, act: Callable[[], object]) -> Iterator[None]:
    """Something happens when a put of one has begun, before its bytes are copied."""
    copier = client._copier
    run_one = copier.run_one

    def later(piece: Piece, of_source: bool, stop: Callable[[], bool]) -> int | None:
        if of_source:
            act()
        return run_one(piece, of_source, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copier, "run_one", later)
        yield


def kinds_asked(service: ArenaService, patch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every request that the service is asked."""
    asked: list[str] = []
    answer = service.answer

    def noted(kind: int, reader: Reader, handler: Handler) -> bytes:
        asked.append(Kind(kind).name)
        return answer(kind, reader, handler)

    patch.setattr(service, "answer", noted)
    return asked
