"""Tenants over HTTP, a drop with requests in flight, and storage that is taken away and given back while a request runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import HTTPException

from hicache_ray.actors.serve import Generate, tenant_of
from hicache_ray.actors.setup import namespace_of, tenant_caps, tenant_namespaces
from hicache_ray.config_sources import load
from hicache_ray.keys import as_tokens, page_keys, space_of
from tests.actors.rig import GRID, Tier, held, kill, prompt, reused, same, tenants, until

COUNT = 2 * GRID + 1
TIERS = ("device", "host", "storage")


def nowhere(where: dict[str, Any]) -> bool:
    return not any(held(where, name) for name in TIERS)


@pytest.mark.ray
def test_tenants_share_nothing_and_one_is_dropped_while_its_request_runs(tier: Tier) -> None:
    tokens, acme, zenith = prompt(4000, COUNT), tier, tier.of("zenith")
    for header in (None, "Bearer wrong", "Basic key-of-acme", "key-of-acme", "Bearer the salt of acme"):
        headers = {} if header is None else {"Authorization": header}
        refused = tier.client.post(f"{tier.cluster.url}/generate", json={"input_ids": tokens}, headers=headers)
        assert refused.status_code == 401, header
        assert refused.headers["WWW-Authenticate"] == "Bearer"
    for name in ("salt", "tenant", "namespace"):
        refused = tier.post(tokens, **{name: "zenith"})
        assert refused.status_code == 422
        assert "does not say whose it is" in refused.text

    before = tier.replica()["tenants"]
    cold = acme.generate(tokens)
    assert cold["computed_tokens"] == COUNT
    acme.sealed(tokens)
    assert zenith.generate(tokens)["computed_tokens"] == COUNT
    zenith.sealed(tokens)
    assert reused(acme.generate(tokens)) == reused(zenith.generate(tokens)) == 2 * GRID
    now = tier.replica()["tenants"]
    old = before.get("zenith", dict.fromkeys(now["zenith"], 0))
    assert {k: n - old[k] for k, n in now["zenith"].items()} == {"device": 2 * GRID, "host": 0, "storage": 0, "computed": COUNT + 1}
    assert "inside" not in now

    running = prompt(4001, COUNT)
    with acme.streamed(running, 128) as events:
        first = next(events)
        dropped = tier.admin("POST", "/drop", json={"tenant": "acme"})
        assert dropped.status_code == 200, dropped.text
        answer = dropped.json()
        assert answer["left"] == 0
        assert all(answer["removed"][name] > 0 for name in TIERS)
        assert [record["tenant"] for record in answer["dropped"]] == ["acme"]
        assert "salt of acme" not in dropped.text
        assert nowhere(acme.where(tokens))
        *_, last = events  # it goes on to its end
    assert last["output_ids"][: len(first["token_ids"])] == first["token_ids"]
    assert len(last["output_ids"]) == 128
    tier.at_rest()
    assert nowhere(acme.where(running))  # and leaves nothing
    assert all(held(zenith.where(tokens), name) for name in TIERS)
    assert reused(zenith.generate(tokens)) == 2 * GRID
    again = acme.generate(tokens)
    assert again["computed_tokens"] == COUNT
    assert same(again, cold)
    acme.sealed(tokens)

    assert tier.admin("POST", "/drop", json={"tenant": "nobody"}).status_code == 404
    for body in ({}, {"namespace": {}}, {"namespace": {"salt": "x"}}, {"tenant": "acme", "namespace": {"tenant": "acme"}}):
        assert tier.admin("POST", "/drop", json=body).status_code == 422
    assert tier.admin("POST", "/drop", json={"namespace": {"tenant": "zenith", "page_size": "64"}}).json()["left"] == 0
    assert nowhere(zenith.where(tokens))
    assert held(acme.where(tokens), "storage")


@pytest.mark.ray
def test_storage_is_detached_and_attached_while_a_request_runs(tier: Tier) -> None:
    tokens, other = prompt(4010, COUNT), prompt(4011, COUNT)
    cold = tier.generate(tokens)
    tier.sealed(tokens)
    tier.at_rest()
    objects = tier.storage()["objects"]
    with tier.streamed(other, 128) as events:
        next(events)
        answer = tier.admin("POST", "/storage/detach")
        assert answer.json() == {"attached": False, "replicas": 1}
        *_, last = events
    assert len(last["output_ids"]) == 128
    row = tier.at_rest()
    assert row["attached"] is False
    tier.flush("device", "host")
    missed = tier.generate(tokens)
    assert missed["computed_tokens"] == COUNT
    assert same(missed, cold)
    # A coordinator and a rank that are started anew keep away from it as well.
    for pid in (row["pid"], row["rank_pids"][1]):
        kill(pid)
        missed = tier.generate(tokens)
        assert missed["computed_tokens"] == COUNT
        assert same(missed, cold)
        row = tier.at_rest()
        assert row["attached"] is False
    tier.at_rest()
    assert tier.storage()["objects"] == objects
    assert tier.admin("POST", "/storage/detach").status_code == 200  # it is away already
    assert tier.admin("POST", "/storage/attach").json() == {"attached": True, "replicas": 1}
    tier.flush("device", "host")
    back = tier.generate(tokens)
    assert back["cached_tokens"] == {"device": 0, "host": 0, "storage": 2 * GRID}
    assert same(back, cold)
    tier.generate(other)
    tier.sealed(other)
    assert until(lambda: tier.storage()["objects"] > objects, "a backup to the attached storage")


# -- without a cluster -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "tenant"), [("Bearer key-of-acme", "acme"), ("Bearer key-of-zenith", "zenith"), ("Bearer key-of-inside", None), ("", None)]
)
def test_a_key_says_whose_a_request_is(header: str, tenant: str | None) -> None:
    config = load(flags=tenants()).config
    assert tenant_of(load().config, header) is None  # where there are none nothing changes
    if tenant is not None:
        assert tenant_of(config, header) == tenant
        return
    with pytest.raises(HTTPException) as refused:
        tenant_of(config, header)
    assert refused.value.status_code == 401


@pytest.mark.parametrize("given", [["salt"], ["tenant"], ["namespace"], ["salt", "tenant", "namespace"]])
def test_a_body_cannot_say_it(given: Sequence[str]) -> None:
    with pytest.raises(ValueError, match=f"leave out {', '.join(given)}; a tenant's clients send its key"):
        Generate.model_validate({"input_ids": [1], **dict.fromkeys(given, "x")})


def test_namespaces_of_tenants() -> None:
    config = load(flags={**tenants(), "tenants.acme.max_bytes": "1MiB", "namespace.salt": "of the house"}).config
    base = namespace_of(config, "some weights")
    mine = tenant_namespaces(config, base)
    assert list(mine) == ["acme", "zenith", "inside"]
    assert mine["acme"].record()["tenant"] == "acme"
    assert "salt of acme" not in str(mine["acme"].record())
    spaces = {space_of(page_keys(ns, as_tokens(range(64)))[0]) for ns in (base, *mine.values())}
    assert len(spaces) == 4
    assert tenant_namespaces(load(flags=tenants()).config, base) == mine
    other = tenant_namespaces(config, namespace_of(load().config, "some weights"))
    assert other["acme"].digest() != mine["acme"].digest()
    assert tenant_caps(config) == {"acme": 1 << 20}
