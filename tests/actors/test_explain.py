"""``GET /explain/{id}`` and ``hicache-ray explain``, over a coordinator's logic and the admin application; no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from hicache_ray import cli_admin
from hicache_ray.actors.admin import create_app, unknown_request
from hicache_ray.actors.driver import Driver
from hicache_ray.cli import app
from hicache_ray.explain import Explainer, lacks_all
from hicache_ray.testing import Stack
from tests.actors.test_driver import Ranks, at_rest, collect, make, request, run
from tests.core.drive import prompt

TOKEN = {"Authorization": "Bearer the token"}


class Backend:
    """Answers from one stack."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    async def explain(self, rid: str) -> Mapping[str, Any]:
        if self.stack.explainer.find(rid) is None:
            raise unknown_request(rid)
        return self.stack.explain(rid)

    async def flush(self, tiers: Sequence[str], timeout_s: float | None) -> int:
        raise AssertionError("not asked for here")

    drop = plug = stats = where = config = flush  # type: ignore[assignment]


@pytest.fixture
def client() -> TestClient:
    stack = Stack()
    for rid in ("first", "with/a slash?"):
        stack.put(prompt(1, 257), rid)
        stack.settle()
    return TestClient(create_app(Backend(stack), "the token"))  # type: ignore[arg-type]


def test_the_endpoint_needs_the_token(client: TestClient) -> None:
    assert client.get("/explain/first").status_code == 401


def test_a_request_is_explained_without_its_prompt(client: TestClient) -> None:
    answer = client.get("/explain/first", headers=TOKEN)
    told = answer.json()
    assert (answer.status_code, told["request_id"], told["limit"]["cause"]) == (200, "first", "never_stored")
    tokens = prompt(1, 257)
    assert not any(f" {token}," in answer.text or f"[{token}," in answer.text for token in tokens)
    told = client.get("/explain/with%2Fa%20slash%3F", headers=TOKEN).json()
    assert told["sources"] == {"full": {"device": [[0, 4]]}}


def test_an_unknown_one_is_told_in_a_sentence(client: TestClient) -> None:
    answer = client.get("/explain/nobody", headers=TOKEN)
    assert answer.status_code == 404
    assert answer.json()["detail"] == (
        'no replica knows a request with the id "nobody"; it may be under way still, or older than the last 1000 of its replica'
    )


def test_the_command(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def through(method: str, url: str, **more: Any) -> httpx.Response:
        more.pop("timeout")
        return client.request(method, url.removeprefix("http://nowhere"), **more)

    monkeypatch.setattr(cli_admin.httpx, "request", through)
    words = ["--url", "http://nowhere", "--token", "the token"]
    shown = CliRunner().invoke(app, ["explain", "with/a slash?", *words])
    assert shown.exit_code == 0, shown.output
    assert "request with/a slash?: resumed at 256 of 257 tokens\n  full: device [0, 4)\n" in shown.output
    unknown = CliRunner().invoke(app, ["explain", "nobody", *words])
    assert unknown.exit_code == 2


def test_a_driver_remembers_what_it_has_served() -> None:
    async def story() -> None:
        stack, first = make()
        await first.close()
        given = Explainer(stack.cache.settings)  # empty, and kept from one incarnation to the next
        driver = Driver(stack.cache, Ranks(stack), stack.store, stack.tags, stack.group, given)
        await collect(driver, request(stack, 10, "r"))
        await at_rest(driver)
        kept = given.find("r")
        assert kept is not None
        assert lacks_all(kept.told)
        assert kept.first.tolist() == [0, 1, 2, 3]
        assert given.find("nobody") is None
        await driver.close()

    run(story())
