"""A storage actor that Ray starts anew: whatever fails then must not be the end of it. The function itself, without Ray."""

from __future__ import annotations

import logging
import os

import pytest

from hicache_ray.actors import storage
from hicache_ray.errors import ConfigError, StoreError


class Exited(BaseException):
    """In the place of the end of this process."""


@pytest.fixture(autouse=True)
def no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(storage, "RETRY_S", 0.0)


@pytest.mark.parametrize("kind", [ConfigError, StoreError, OSError, KeyError, RuntimeError])
def test_a_start_that_fails_is_tried_again(kind: type[Exception]) -> None:
    failures = [kind("no room yet"), kind("nor now")]

    def start() -> str:
        if failures:
            raise failures.pop()
        return "started"

    assert storage.persistently(start) == "started"


@pytest.mark.parametrize("kind", [StoreError, OSError, KeyError])
def test_one_that_fails_for_long_ends_the_process(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(storage, "ROOM_S", -1.0)

    def start() -> str:
        raise kind("it is broken")

    with pytest.raises(Exited) as ended, caplog.at_level(logging.ERROR):
        storage.persistently(start)
    assert ended.value.args == (1,)
    assert f"storage cannot start again, Ray tries anew: {kind.__name__}" in caplog.text
