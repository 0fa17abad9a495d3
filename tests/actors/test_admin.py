"""The admin endpoint: who may ask, what a flush promises, and numbers that add up. And what the processes behind it are made of."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.testclient import TestClient

from hicache_ray.actors.admin import OPEN, UnknownNamespace, create_app, unknown_request
from hicache_ray.errors import Busy, ConfigError, HiCacheError, StorageDetached
from tests.actors.rig import GRID, Tier, held, prompt, titled, until

pytestmark = pytest.mark.ray


class Failing:
    """Every question to the cluster ends like this."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        async def fail(*_: object) -> Any:
            raise self.error

        return fail


def routes() -> list[tuple[str, str]]:
    """All that the application has, but the one that is open."""
    found: list[Any] = [route for route in create_app(Failing(HiCacheError()), "token").routes if getattr(route, "path", OPEN) != OPEN]
    mine = [(method, route.path.replace("{rid:path}", "r")) for route in found for method in sorted(route.methods)]
    return mine


#: Those that there are not are guarded as well.
ROUTES = [*routes(), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nothing"), ("DELETE", "/health/"), ("GET", "/")]
#: A body that makes sense, for each route that asks the cluster.
ASKING = {
    ("POST", "/flush"): {"tiers": ["host"], "preserve": True},
    ("POST", "/drop"): {"tenant": "acme"},
    ("POST", "/storage/detach"): None,
    ("POST", "/storage/attach"): None,
    ("GET", "/stats"): None,
    ("POST", "/where"): {"input_ids": [3]},
    ("GET", "/explain/r"): None,
}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Busy("try later"), 409),
        (StorageDetached("attach it first"), 409),
        (UnknownNamespace("nothing was dropped"), 404),
        (unknown_request("r"), 404),
        (ConfigError("choose another"), 400),
        (HiCacheError("Ray's control service did not answer"), 503),
    ],
    ids=lambda what: type(what).__name__,
)
def test_what_the_cluster_says_is_an_answer_at_every_route(error: Exception, status: int) -> None:
    assert set(ASKING) | {("GET", "/config")} == set(routes())
    client = TestClient(create_app(Failing(error), "token"), headers={"Authorization": "Bearer token"})
    for (method, route), body in ASKING.items():
        answer = client.request(method, route, json=body)
        assert (answer.status_code, answer.json()) == (status, {"detail": str(error)}), route


def test_health_is_open_and_all_else_needs_the_token(tier: Tier) -> None:
    url = tier.cluster.admin_url
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    for method, route in ROUTES:
        for given in (None, "Bearer wrong", f"Basic {tier.cluster.token}", f"Bearer {tier.cluster.token}x", tier.cluster.token, "Bearer ü"):
            headers = {} if given is None else {"Authorization": given.encode()}
            refused = httpx.request(method, f"{url}{route}", headers=headers)
            assert refused.status_code == 401, (method, route, given)
            assert refused.headers["WWW-Authenticate"] == "Bearer"
    assert tier.admin("GET", "/openapi.json").status_code == 404


def test_a_body_is_not_even_read_without_the_token(tier: Tier) -> None:
    assert httpx.post(f"{tier.cluster.admin_url}/flush", content=b"{no json").status_code == 401


@pytest.mark.parametrize(
    "body",
    [{"tiers": ["disk"]}, {"tiers": []}, {"timeout_s": 0}, {"timeout_s": 1e9}, {"timeout_s": "soon"}, {"tier": ["device"]}, [], "all",
     {"preserve": "much"}, {"preserve": True, "tiers": ["host", "storage"]}],
    ids=str,
)
def test_a_flush_that_makes_no_sense_is_refused(tier: Tier, body: object) -> None:
    tokens = prompt(2000, 100)
    tier.generate(tokens)
    before = tier.at_rest()["tiers"]["device"]["full"]["used"]
    assert tier.admin("POST", "/flush", json=body).status_code == 422
    assert tier.replica()["tiers"]["device"]["full"]["used"] == before


@pytest.mark.parametrize("body", [{"input_ids": []}, {"input_ids": [-1]}, {"input_ids": [1 << 31]}, {}], ids=str)
def test_a_where_that_makes_no_sense_is_refused(tier: Tier, body: object) -> None:
    assert tier.admin("POST", "/where", json=body).status_code == 422


def test_a_flush_empties_device_and_host_and_on_request_storage(tier: Tier) -> None:
    tokens = prompt(2010, 2 * GRID + 1)
    tier.generate(tokens)
    before = tier.sealed(tokens)
    assert all(held(before, name) for name in ("device", "host", "storage"))
    tier.at_rest()
    answer = tier.admin("POST", "/flush")
    assert answer.json() == {"flushed": ["device", "host"], "replicas": 1}
    after = tier.where(tokens)
    assert (held(after, "device"), held(after, "host")) == (0, 0)
    assert after["held"]["storage"] == before["held"]["storage"]
    tier.flush("storage")
    assert tier.where(tokens)["resumable"] == {"device": 0, "host": 0, "storage": 0}
    assert held(tier.where(tokens), "storage") == 0
    assert tier.storage()["objects"] == 0
    assert tier.generate(tokens)["computed_tokens"] == 2 * GRID + 1
    # Storage counts as empty from now on, so what is computed anew is stored anew.
    assert held(tier.sealed(tokens), "storage") == held(before, "storage")


def test_a_flush_that_preserves_writes_to_storage_what_would_be_lost(tier: Tier) -> None:
    tokens = prompt(2015, 2 * GRID + 1)
    tier.generate(tokens)
    tier.sealed(tokens)
    tier.at_rest()
    tier.flush("storage")  # device and host alone have it now
    assert held(tier.where(tokens), "storage") == 0
    answer = tier.admin("POST", "/flush", json={"tiers": ["device", "host"], "preserve": True})
    assert answer.json() == {"flushed": ["device", "host"], "replicas": 1}
    after = tier.where(tokens)
    assert after["resumable"] == {"device": 0, "host": 0, "storage": 2 * GRID}
    assert (held(after, "device"), held(after, "host")) == (0, 0)


def test_a_flush_waits_for_requests_only_when_told_to(tier: Tier) -> None:
    tokens = prompt(2020, GRID + 1)
    served = tier.at_rest()["requests"]
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(tier.generate, tokens, 256)
        until(lambda: tier.replica()["active"], "a request under way")
        refused = tier.admin("POST", "/flush")
        assert refused.status_code == 409
        assert "timeout_s" in refused.json()["detail"]
        late = tier.admin("POST", "/flush", json={"timeout_s": 0.05})
        assert late.status_code == 409
        assert "within the timeout" in late.json()["detail"]
        assert not long.done()
        assert tier.admin("POST", "/flush", json={"timeout_s": 60}).status_code == 200
        # The request that it has waited for is over, and what that has cached is gone.
        assert tier.replica()["requests"] == served + 1
        assert held(tier.where(tokens), "device") == 0
        long.result()


def test_numbers_add_up(tier: Tier) -> None:
    tier.at_rest()
    tier.flush("device", "host", "storage")
    before, row = tier.stats(), tier.replica()
    prompts = [prompt(2030, 2 * GRID + 1), prompt(2030, 2 * GRID + 1), prompt(2031, 700)]
    for tokens in prompts:
        tier.generate(tokens, 2)
    tier.sealed(prompts[0])
    tier.at_rest()
    tier.flush("device", "host")
    tier.generate(prompts[0], 2)
    tier.at_rest()
    after, now = tier.stats(), tier.replica()
    moved = {source: after["tokens"][source] - before["tokens"][source] for source in after["tokens"]}
    assert moved == {"device": 2 * GRID, "host": 0, "storage": 2 * GRID, "computed": 2 * GRID + 1 + 1 + 700 + 1}
    assert sum(moved.values()) == sum(map(len, prompts)) + len(prompts[0])
    assert after["requests"] - before["requests"] == 4
    for name, pages in (("full", 8 + 8), ("state", 2 + 2)):
        for place in ("host", "storage"):
            old, new = row["tiers"][place][name], now["tiers"][place][name]
            made = {field: new[field] - old[field] for field in ("backups", "failures", "refused")}
            assert made == {"backups": pages, "failures": 0, "refused": 0}, (place, name)
        for place in ("device", "host"):
            tally = now["tiers"][place][name]
            assert tally["used"] + tally["held"] + tally["free"] == tally["capacity"]
            assert tally["held"] == 0
    assert tier.storage()["objects"] == 2 * (16 + 4)  # of both ranks; the last chunk is not whole, so it is not kept
    assert tier.storage()["checksum_failures"] == 0


def test_a_request_is_explained(tier: Tier) -> None:
    tokens = prompt(2035, 2 * GRID + 1)
    tier.generate(tokens, request_id="explained/cold")
    tier.at_rest()
    tier.flush("device", "host")
    tier.generate(tokens, request_id="explained/warm")
    tier.at_rest()
    answer = tier.admin("GET", "/explain/explained%2Fcold")
    assert answer.status_code == 200, answer.text
    cold = answer.json()
    assert (cold["resumed_tokens"], cold["limit"]["cause"], cold["longer"]["tokens"]) == (0, "never_stored", GRID)
    warm = tier.admin("GET", "/explain/explained%2Fwarm").json()
    assert warm["sources"] == {"full": {"storage": [[0, 8]]}, "state": {"storage": [[7, 8]]}}
    assert (warm["resumed_tokens"], warm["limit"]["cause"], warm["longer"]) == (2 * GRID, "none", None)
    unknown = tier.admin("GET", "/explain/nobody")
    assert unknown.status_code == 404
    assert unknown.json()["detail"].startswith('no replica knows a request with the id "nobody"')


def test_the_configuration_is_shown_without_its_secrets(tier: Tier) -> None:
    response = tier.admin("GET", "/config")
    shown = response.json()
    assert shown["model"]["tp"] == 2
    assert shown["cache"]["grid"] == GRID
    assert "a tenant's secret" not in response.text
    assert tier.cluster.token not in response.text
    assert "a tenant's secret" not in tier.admin("GET", "/stats").text


def test_everything_listens_on_loopback_only(tier: Tier) -> None:
    config = tier.cluster.config
    for port in (config.admin.port, config.serve.port):
        at = {c.laddr.ip for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port}
        assert at == {"127.0.0.1"}


def test_decode_makes_no_call_until_a_page_is_complete(tier: Tier) -> None:
    tokens = prompt(2040, 300)
    tier.generate(tokens, 1)
    before = tier.at_rest()["calls"]
    answer = tier.generate(tokens, 20)  # cached lengths 300 to 319; the page ends at 320
    assert answer["cached_tokens"]["device"] == GRID
    after = tier.at_rest()["calls"]
    assert after["rank"] - before["rank"] == 2 * 2  # one record of prefill and one of decode, for each of two ranks
    assert after["store"] == before["store"]


def test_only_ranks_carry_torch(tier: Tier) -> None:
    stats, row = tier.stats(), tier.replica()
    light = {
        "coordinator": row["pid"],
        "storage": tier.storage()["pid"],
        "gateway": stats["gateway"]["pid"],
        "replica": titled("ServeReplica")[0],
    }
    with_torch = {name: pid for name, pid in light.items() if "libtorch" in Path(f"/proc/{pid}/maps").read_text()}
    assert with_torch == {}
    assert sorted(row["rank_pids"]) == sorted(titled("RankShell"))
    assert all("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in row["rank_pids"])
