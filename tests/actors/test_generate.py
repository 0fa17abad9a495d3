"""Generation over HTTP: the same bits from every tier, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.actors.rig import GRID, VOCABULARY, Tier, held, prompt, reused, same, until

pytestmark = pytest.mark.ray
#: A multiple of the grid; of the page but not of the grid; one more than the grid; below the grid; below a page; a single token; several.
LENGTHS = (2 * GRID, GRID + 64, GRID + 1, 200, 40, 1, 4 * GRID + 1)


@pytest.mark.parametrize("count", LENGTHS)
def test_a_prompt_is_served_from_every_tier_alike(tier: Tier, count: int) -> None:
    tokens, wanted = prompt(count, count), (count - 1) // GRID * GRID
    cold = tier.generate(tokens)
    assert cold["computed_tokens"] == count
    for source in ("device", "host", "storage"):
        if source == "host":
            tier.at_rest()
            tier.flush("device")
        elif source == "storage":
            tier.sealed(tokens)
            tier.flush("device", "host")
        answer = tier.generate(tokens)
        assert answer["cached_tokens"] == {"device": 0, "host": 0, "storage": 0} | {source: wanted}
        assert same(answer, cold)


def test_an_extended_prompt_reuses_all_chunks_of_its_beginning(tier: Tier) -> None:
    tokens = prompt(1001, 2 * GRID)
    tier.generate(tokens)
    longer = tier.generate(tokens + prompt(1002, 30))
    assert longer["cached_tokens"]["device"] == 2 * GRID


def test_a_split_inside_a_chunk_resumes_before_it(tier: Tier) -> None:
    shared = prompt(1003, GRID + 100)
    tier.generate(shared + prompt(1004, 300))
    assert tier.generate(shared + prompt(1005, 300))["cached_tokens"]["device"] == GRID


def test_a_stream_tells_the_same_piece_by_piece(tier: Tier) -> None:
    tokens = prompt(1010, 300)
    whole = tier.generate(tokens, 70)
    with tier.streamed(tokens, 70) as events:
        *parts, last = list(events)
    assert [t for part in parts for t in part["token_ids"]] == whole["output_ids"]
    assert [p for part in parts for p in part["logprobs"]] == whole["logprobs"]
    assert len(parts) >= 3  # the first token, up to the end of a page, the rest
    assert same(last, whole)
    assert last["cached_tokens"]["device"] == GRID


def test_logprobs_and_digests_come_when_they_are_asked_for(tier: Tier) -> None:
    tokens = prompt(1011, GRID + 1)
    plain = tier.post(tokens, return_logprob=False).json()
    assert "logprobs" not in plain
    assert "digests" not in plain
    asked = tier.generate(tokens, digests=True, request_id="mine")
    assert asked["request_id"] == "mine"
    assert asked["output_ids"] == plain["output_ids"]
    assert sorted(asked["digests"]) == ["full", "state"]
    assert all(len(digests) == 2 for digests in asked["digests"]["full"].values())  # one of each rank
    assert asked["digests"]["full"]["0"][0] != asked["digests"]["full"]["0"][1]


BAD = {
    "no token": ({"input_ids": []}, 422, "at least 1 item"),
    "an unknown field": ({"input_ids": [5], "temperature": 0.5}, 422, "temperature"),
    "no number": ({"input_ids": ["five"]}, 422, "integer"),
    "a negative token": ({"input_ids": [5, -1]}, 422, "greater than or equal to 0"),
    "a token of 40 bits": ({"input_ids": [1 << 40]}, 422, "less than"),
    "nothing to generate": ({"input_ids": [5], "max_new_tokens": 0}, 422, "max_new_tokens"),
    "too long a prompt": ({"input_ids": [5] * 1501}, 400, "engine.max_prompt_tokens"),
    "too long an answer": ({"input_ids": [5], "max_new_tokens": 257}, 400, "engine.max_new_tokens"),
    "an unknown token": ({"input_ids": [5, VOCABULARY]}, 400, f"the model knows tokens 0 to {VOCABULARY - 1}"),
    "an unknown token, streamed": ({"input_ids": [VOCABULARY], "stream": True}, 400, "the model knows"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_with_a_sentence_and_touches_no_other(tier: Tier, name: str) -> None:
    body, status, words = BAD[name]
    tokens = prompt(1020, 100)
    before = tier.generate(tokens)
    response = httpx.post(f"{tier.cluster.url}/generate", json=body, headers=tier.headers(), timeout=60.0)
    assert response.status_code == status
    assert words in response.text
    assert "Traceback" not in response.text
    assert same(tier.generate(tokens), before)
    tier.at_rest()


def test_an_id_is_refused_while_it_is_in_use(tier: Tier) -> None:
    tokens = prompt(1030, 100)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(tier.generate, tokens, 256, request_id="twice")
        until(lambda: tier.replica()["active"], "a request under way")
        second = tier.post(tokens, request_id="twice")
        assert second.status_code == 409
        assert second.json()["detail"] == 'a request with the id "twice" is under way; choose another request_id'
        long.result()
    assert tier.post(tokens, request_id="twice").status_code == 200


def test_clients_that_share_prefixes_get_what_they_would_get_alone(tier: Tier) -> None:
    families = [prompt(1100 + f, 2 * GRID + 60) for f in range(2)]
    prompts = [families[i % 2] + prompt(1200 + i, 20 + 40 * i) for i in range(8)]
    alone = []
    for tokens in prompts:
        tier.flush("device", "host", "storage")
        alone.append(tier.generate(tokens, 6))
        assert reused(alone[-1]) == 0
        tier.at_rest()
    tier.flush("device", "host", "storage")
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda tokens: tier.generate(tokens, 6), prompts))
    assert all(same(a, b) for a, b in zip(together, alone, strict=True))
    # The first of each family computes; the others find at least the grid boundary before the split.
    assert sorted(reused(a) for a in together)[2:] == [2 * GRID] * 6
    tier.at_rest()


def test_what_the_queue_cannot_hold_is_refused_as_busy(tier: Tier) -> None:
    limit = tier.cluster.config.engine.max_queue + 1  # one runs, the others wait
    tokens = prompt(1300, 100)
    wanted = tier.generate(tokens, 16)
    with ThreadPoolExecutor(3 * limit) as pool:
        answers = list(pool.map(lambda _: tier.post(tokens, 16), range(3 * limit)))
    served = [a for a in answers if a.status_code == 200]
    refused = [a for a in answers if a.status_code != 200]
    assert len(served) >= limit
    assert all(same(a.json(), wanted) for a in served)
    assert refused
    assert {a.status_code for a in refused} == {503}
    assert all("engine.max_queue" in a.json()["detail"] for a in refused)
    tier.at_rest()


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_hangs_up_cancels_its_request(tier: Tier, streamed: bool) -> None:
    tokens = prompt(1400 + streamed, 600)
    before = tier.at_rest()["requests"]
    if streamed:
        with tier.streamed(tokens, 256) as events:
            assert len(next(events)["token_ids"]) == 1
    else:
        body = {"input_ids": tokens, "max_new_tokens": 256}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{tier.cluster.url}/generate", json=body, headers=tier.headers(), timeout=httpx.Timeout(30.0, read=0.5))
    assert tier.at_rest()["requests"] == before  # it has not been served to its end


def test_clients_that_hang_up_touch_no_other_request(tier: Tier) -> None:
    """Whoever is waited for meanwhile, records of one request are sent while another's is handled."""
    tokens = prompt(1410, 300)
    wanted = tier.generate(tokens, 128)
    incarnation = tier.at_rest()["incarnation"]
    with ThreadPoolExecutor(1) as pool:
        bystander = pool.submit(tier.generate, tokens, 128)
        until(lambda: tier.replica()["active"], "a request under way")
        for i in range(4):
            body = {"input_ids": prompt(1411 + i, 300), "max_new_tokens": 256}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{tier.cluster.url}/generate", json=body, headers=tier.headers(), timeout=httpx.Timeout(30.0, read=0.2))
        assert same(bystander.result(), wanted)
    assert tier.at_rest()["incarnation"] == incarnation


def test_another_replica_finds_in_storage_what_it_never_computed(tier: Tier) -> None:
    tokens = prompt(1500, 4 * GRID + 1)
    cold = tier.generate(tokens)
    assert tier.sealed(tokens)["resumable"]["storage"] == 4 * GRID
    tier.cluster.scale(2)
    try:
        rows = tier.stats()["replicas"]
        assert len(rows) == 2
        other = until(lambda: _from_another(tier, tokens, cold["replica"]), "a request that reaches the new replica")
        assert other["cached_tokens"] == {"device": 0, "host": 0, "storage": 4 * GRID}
        assert same(other, cold)
    finally:
        tier.cluster.scale(1)
    until(lambda: len(tier.stats()["replicas"]) == 1, "the end of one replica")
    assert held(tier.where(tokens), "storage") == 4 * GRID // 64 + 4


def _from_another(tier: Tier, tokens: list[int], replica: str) -> dict[str, object] | None:
    answer = tier.generate(tokens)
    return answer if answer["replica"] != replica else None
