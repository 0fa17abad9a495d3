"""The commands an operator has: ``status``, ``stats``, ``flush`` against a tier that runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from hicache_ray import cli
from tests.actors.rig import Tier, held, prompt

pytestmark = pytest.mark.ray


@pytest.fixture
def command(tier: Tier) -> Callable[..., tuple[int, str, str]]:
    def run(*args: str, token: str = tier.cluster.token) -> tuple[int, str, str]:
        result = CliRunner().invoke(cli.app, [*args, "--url", tier.cluster.admin_url, "--token", token], env={"COLUMNS": "160"})
        return result.exit_code, re.sub(r"\s+", " ", result.stdout), re.sub(r"\s+", " ", result.stderr)

    return run


def test_status_counts_replicas_and_stores(command: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = command("status")
    assert code == 0
    assert re.search(r"1 of 1 replicas and 1 storage node\(s\) answer; \d+ requests served", out)


def test_stats_are_a_table_or_json(tier: Tier, command: Callable[..., tuple[int, str, str]]) -> None:
    tier.generate(prompt(901, 300))
    code, out, _ = command("stats")
    assert code == 0
    for word in ("device", "host", "storage", "full", "state", "evictions", "tokens by source"):
        assert word in out
    code, out, _ = command("stats", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["tokens"]["computed"] >= 300
    replica = next(iter(found["replicas"].values()))
    assert {"used", "capacity", "evictions", "backups", "failures"} <= set(replica["tiers"]["device"]["full"])


def test_flush_empties_what_it_is_told_to(tier: Tier, command: Callable[..., tuple[int, str, str]]) -> None:
    tokens = prompt(902, 520)
    tier.generate(tokens)
    where = tier.sealed(tokens)
    assert held(where, "storage") == held(where, "device") > 0
    code, out, _ = command("flush", "--timeout", "20")
    assert (code, out.strip()) == (0, "flushed device, host of 1 replica(s)")
    where = tier.where(tokens)
    assert (held(where, "device"), held(where, "host")) == (0, 0)
    assert held(where, "storage") > 0
    code, out, _ = command("flush", "--tier", "storage", "--timeout", "20")
    assert (code, out.strip()) == (0, "flushed storage of 1 replica(s)")
    assert held(tier.where(tokens), "storage") == 0
    tier.generate(tokens, 1)
    code, out, _ = command("flush", "--preserve", "--timeout", "20")
    assert (code, out.strip()) == (0, "flushed device, host of 1 replica(s)")
    assert tier.where(tokens)["resumable"] == {"device": 0, "host": 0, "storage": 512}
    code, _, err = command("flush", "--preserve", "--tier", "storage")
    assert code == 2
    assert "answered 422" in err


def test_a_tenant_is_dropped_and_storage_taken_away_and_given_back(tier: Tier, command: Callable[..., tuple[int, str, str]]) -> None:
    tokens = prompt(903, 520)
    tier.generate(tokens)
    tier.sealed(tokens)
    code, out, _ = command("drop", "acme")
    assert code == 0
    assert re.fullmatch(r"dropped acme: [1-9]\d* from device, [1-9]\d* from host, [1-9]\d* from storage; 0 left", out.strip())
    assert not any(held(tier.where(tokens), name) for name in ("device", "host", "storage"))
    code, _, err = command("drop", "nobody")
    assert code == 2
    assert "there is no namespace with tenant 'nobody'; nothing was dropped" in re.sub(r"\s+", " ", err)
    code, out, _ = command("storage", "detach")
    assert (code, out.strip()) == (0, "storage is detached from 1 replica(s)")
    for refused in (("drop", "acme"), ("flush", "--tier", "storage"), ("flush", "--preserve")):
        code, out, err = command(*refused)
        assert (code, out) == (2, "")
        assert "answered 409: storage is detached" in err
    code, out, _ = command("storage", "attach")
    assert (code, out.strip()) == (0, "storage is attached to 1 replica(s)")


def test_a_wrong_token_and_a_wrong_tier_are_sentences(command: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = command("stats", token="wrong")
    assert code == 2
    assert "answered 401" in err
    code, _, err = command("flush", "--tier", "disk")
    assert code == 2
    assert "answered 422" in err
    assert "'device', 'host' or 'storage'" in err
