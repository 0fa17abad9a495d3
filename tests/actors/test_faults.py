"""Processes that die or freeze: requests are answered all the same, with the same bits, and the tier comes back by itself."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from hicache_ray.resume import Limit
from tests.actors.rig import GRID, Tier, held, kill, prompt, reused, same, titled, until

pytestmark = pytest.mark.ray
LONG = 100  # new tokens: several seconds of decode


@pytest.fixture(autouse=True)
def only_the_expected_actors_are_left(tier: Tier) -> Iterator[None]:
    """Before and after every fault: one replica with two ranks and a coordinator, one storage, one gateway, nothing leased."""
    yield
    row = tier.at_rest()
    until(lambda: sorted(titled("RankShell")) == sorted(row["rank_pids"]), "the end of the ranks that were replaced")
    until(lambda: titled("CoordinatorShell") == [row["pid"]], "the end of the coordinator that was replaced")
    assert len(titled("StorageShell")) == len(titled("GatewayShell")) == len(titled("ServeReplica")) == 1


def cold_and_sealed(tier: Tier, seed: int, count: int = 4 * GRID + 1, new: int = 4) -> tuple[list[int], dict[str, Any]]:
    """A prompt that all tiers hold, and its answer."""
    tokens = prompt(seed, count)
    answer = tier.generate(tokens, new)
    tier.sealed(tokens)
    tier.at_rest()
    return tokens, answer


def test_killed_storage_is_a_miss_and_comes_back(tier: Tier) -> None:
    tokens, cold = cold_and_sealed(tier, 3000)
    old = tier.storage()
    kill(old["pid"])
    tier.flush("device", "host")
    answer = tier.generate(tokens)  # whether storage is back already or not, it is empty
    assert answer["computed_tokens"] == len(tokens)
    assert same(answer, cold)
    new = until(lambda: _other_than(tier, old), "a new storage process")
    assert new["incarnation"] != old["incarnation"]
    until(lambda: _stored_again(tier, tokens), "a backup to the new storage")
    tier.flush("device", "host")
    back = tier.generate(tokens)
    assert back["cached_tokens"] == {"device": 0, "host": 0, "storage": 4 * GRID}
    assert same(back, cold)


def test_what_the_host_still_holds_goes_to_the_new_storage(tier: Tier) -> None:
    """A coordinator must not believe for ever that pages are in storage which a crash has emptied."""
    tokens, _ = cold_and_sealed(tier, 3010)
    old, row = tier.storage(), tier.replica()
    readers = [row["pid"], *row["rank_pids"]]
    assert [_maps(pid, old["incarnation"]) for pid in readers] == [True] * 3
    kill(old["pid"])
    until(lambda: _other_than(tier, old), "a new storage process")
    # All let go of the memory of the dead one, which the new one may need.
    until(lambda: not any(_maps(pid, old["incarnation"]) for pid in readers), "the end of the dead one's memory")
    until(lambda: _stored_again(tier, tokens), "a backup to the new storage")


def _maps(pid: int, incarnation: str) -> bool:
    return incarnation in Path(f"/proc/{pid}/maps").read_text()


def _other_than(tier: Tier, old: dict[str, Any]) -> dict[str, Any] | None:
    rows = [row for row in tier.stats()["storage"].values() if "error" not in row]
    return rows[0] if rows and rows[0]["incarnation"] != old["incarnation"] else None


def _stored_again(tier: Tier, tokens: list[int]) -> bool:
    """Every request of a path backs up what is not stored yet."""
    tier.generate(tokens, 1)
    return bool(tier.where(tokens)["resumable"]["storage"] == len(tokens) // GRID * GRID)


def test_frozen_storage_costs_a_deadline_and_thaws(tier: Tier) -> None:
    tokens, cold = cold_and_sealed(tier, 3020)
    tier.flush("device", "host")
    pid = tier.storage()["pid"]
    kill(pid, signal.SIGSTOP)
    try:
        answer = tier.generate(tokens)
        assert answer["limit"] == Limit.LOOKUP.value
        assert answer["computed_tokens"] == len(tokens)
        assert same(answer, cold)
        assert tier.generate(tokens)["cached_tokens"]["device"] == 4 * GRID  # what is near is not asked for far away
    finally:
        kill(pid, signal.SIGCONT)
    tier.at_rest()
    tier.flush("device", "host")

    def hit() -> dict[str, Any] | None:
        again = tier.generate(tokens)
        assert same(again, cold)
        if again["cached_tokens"]["storage"]:
            return again
        tier.at_rest()
        tier.flush("device", "host")
        return None

    assert until(hit, "a hit in the storage that has thawed")["cached_tokens"] == {"device": 0, "host": 0, "storage": 4 * GRID}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_rank_lost_in_a_forward_costs_a_restart_and_no_answer(tier: Tier, number: int) -> None:
    tokens, cold = cold_and_sealed(tier, 3030, 2 * GRID + 1, LONG)
    before = tier.replica()
    other = prompt(3031 + number, 300)
    with ThreadPoolExecutor(1) as pool:
        with tier.streamed(tokens, LONG) as events:
            parts = [next(events)]
            waiting = pool.submit(tier.generate, other)  # queued behind it
            kill(before["rank_pids"][1], number)
            parts += list(events)
        assert waiting.result()["computed_tokens"] == len(other)
    last = parts.pop()
    assert same(last, cold)
    assert [t for part in parts for t in part["token_ids"]] == cold["output_ids"]
    # The restart was warm: what had been computed came from storage.
    assert last["cached_tokens"] == {"device": 0, "host": 0, "storage": 2 * GRID}
    after = tier.replica()
    assert after["incarnation"] == before["incarnation"] + 1
    assert after["rank_pids"][0] == before["rank_pids"][0]  # the other one stays, and keeps its model
    assert after["rank_pids"][1] != before["rank_pids"][1]
    # Of the frozen one its peer tells when gloo's timeout has passed, or the replica finds out first.
    told = ["rank 0 failed", "rank 1 failed"] if number == signal.SIGKILL else ["rank 0 failed", "rank 1 did not answer"]
    assert any(how in after["restarted"] for how in told)


def test_a_killed_coordinator_is_replaced_and_the_request_answered(tier: Tier) -> None:
    tokens, cold = cold_and_sealed(tier, 3040, 2 * GRID + 1, LONG)
    before = tier.replica()
    with tier.streamed(tokens, LONG) as events:
        parts = [next(events)]
        kill(before["pid"])
        parts += list(events)
    assert same(parts[-1], cold)
    assert parts[-1]["cached_tokens"]["storage"] == 2 * GRID
    after = tier.replica()
    assert after["pid"] != before["pid"]
    assert after["rank_pids"] == before["rank_pids"]


def test_a_frozen_coordinator_is_replaced_while_its_request_waits(tier: Tier) -> None:
    """It has no deadline of its own, and Ray takes a frozen process for a living one."""
    tokens, cold = cold_and_sealed(tier, 3045, 2 * GRID + 1, LONG)
    before = tier.replica()
    with tier.streamed(tokens, LONG) as events:
        parts = [next(events)]
        kill(before["pid"], signal.SIGSTOP)
        parts += list(events)
    assert same(parts[-1], cold)
    assert [t for part in parts[:-1] for t in part["token_ids"]] == cold["output_ids"]
    after = tier.replica()
    assert after["pid"] != before["pid"]
    assert after["rank_pids"] == before["rank_pids"]
    assert "the coordinator did not answer" in after["restarted"]


def test_an_idle_group_heals_by_itself(tier: Tier) -> None:
    """Nobody asks for anything; the replica's own health check finds out."""
    tokens, cold = cold_and_sealed(tier, 3050)
    before = tier.replica()
    lost = {before["pid"], before["rank_pids"][0]}
    for pid in lost:
        kill(pid)

    def healed() -> bool:
        rows = [row for row in tier.stats()["replicas"].values() if "error" not in row]
        return len(rows) == 1 and not lost & {rows[0]["pid"], *rows[0]["rank_pids"]}

    until(healed, "healing without a request")
    answer = tier.generate(tokens)
    assert reused(answer) == answer["cached_tokens"]["storage"] == 4 * GRID
    assert same(answer, cold)


def test_a_killed_gateway_answers_again_at_the_same_address(tier: Tier) -> None:
    old = tier.stats()["gateway"]["pid"]
    kill(old)
    until(lambda: titled("GatewayShell") not in ([], [old]), "a new gateway")
    until(lambda: _answers(tier), "an answer of the new gateway")
    assert tier.stats()["gateway"]["pid"] != old


def _answers(tier: Tier) -> bool:
    try:
        return tier.client.get(f"{tier.cluster.admin_url}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_killed_replica_takes_its_actors_along_and_is_replaced(tier: Tier) -> None:
    tokens, cold = cold_and_sealed(tier, 3060)
    before = tier.replica()
    kill(titled("ServeReplica")[0])
    until(lambda: not {before["pid"], *before["rank_pids"]} & {*titled("CoordinatorShell"), *titled("RankShell")}, "the end of its actors")

    def served() -> dict[str, Any] | None:
        response = tier.post(tokens)
        return response.json() if response.status_code == 200 else None

    answer = until(served, "an answer of the new replica")
    assert same(answer, cold)
    assert answer["cached_tokens"]["storage"] == 4 * GRID
    assert held(tier.where(tokens), "storage") > 0
