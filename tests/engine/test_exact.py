"""The engine against transformers' own cache, and resumed against cold runs: the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hicache_ray.digest import digest_pages
from hicache_ray.integrations.transformers import Loaded
from tests.engine.rig import ELSEWHERE, FAMILIES, GRID, PAGE, Rig, load, plain, prompt

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("error:.*not writable:UserWarning")]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("count", [1, PAGE - 3, GRID, GRID + 1, 4 * GRID + 45])
def test_a_cold_run_equals_transformers_own_cache(loaded: Loaded, count: int) -> None:
    rig = Rig(loaded)
    assert rig.run(rig.record(prompt(count), 6)).outcome == plain(loaded.model, prompt(count), 6)


@pytest.mark.parametrize("start", range(GRID, 5 * GRID, GRID))
def test_resuming_at_a_grid_boundary_gives_the_same_bits(loaded: Loaded, start: int) -> None:
    cold, resumed = Rig(loaded).cold_and_resumed(prompt(4 * GRID + 45), 6, start)
    assert resumed == cold
    assert len(cold.digests) >= (4 * GRID + 48 - start) // PAGE
    assert len(set(cold.outcome.output)) > 1


def test_one_token_past_the_grid(loaded: Loaded) -> None:
    cold, resumed = Rig(loaded).cold_and_resumed(prompt(3 * GRID + 1), 1, 3 * GRID)
    assert resumed.outcome == cold.outcome


@pytest.mark.parametrize(("layout", "offset"), [("layer_first", 0), ("page_first", 0), ("page_head", 0), ("page_first_direct", 4)])
def test_where_the_bytes_lie_does_not_matter(loaded: Loaded, layout: str, offset: int) -> None:
    straight, shuffled = Rig(loaded, shuffled=False), Rig(loaded, layout=layout, offset=offset)
    boundaries = range(GRID, 3 * GRID, GRID)
    tokens = prompt(2 * GRID + 9)
    one = straight.run(straight.record(tokens, 4, snapshots=boundaries))
    two = shuffled.run(shuffled.record(tokens, 4, snapshots=boundaries))
    assert one == two
    assert one.digests


def test_the_prompt_matters_beyond_the_last_chunk(loaded: Loaded) -> None:
    """A model that ignored what is cached would agree with itself; these two prompts differ in one token of the first chunk only."""
    rig = Rig(loaded)
    tokens = prompt(2 * GRID + 9)
    other = tokens.copy()
    other[GRID - 2] += 1
    assert rig.run(rig.record(tokens, 4)).outcome.logprobs != rig.run(rig.record(other, 4)).outcome.logprobs


def test_chunked_agrees_with_one_shot(loaded: Loaded) -> None:
    rig = Rig(loaded)
    tokens = prompt(4 * GRID + 45)
    chunked, whole = rig.run(rig.record(tokens, 6)).outcome, rig.run(rig.record(tokens, 6, grid=0)).outcome
    assert chunked.output == whole.output
    np.testing.assert_allclose(chunked.logprobs, whole.logprobs, atol=1e-4)
    assert rig.engine.ran.prefill == (4 * GRID + 45,)


def test_snapshots_during_decode_are_those_of_a_run_that_stops_there(loaded: Loaded) -> None:
    rig, tokens, tracked = Rig(loaded), prompt(100), (112, 128, 144)
    whole = rig.record(tokens, 60, snapshots=tracked)
    outcome = rig.run(whole).outcome
    for name, made in whole.snapshots.items():
        for (length, _), digest in zip(made, digest_pages(rig.pools[name], [slot for _, slot in made]), strict=True):
            short = rig.record(tokens, length - 99, shift=ELSEWHERE)
            assert short.end == length
            rig.run(short)
            assert digest_pages(rig.pools[name], [short.live[name]]) == (digest,)
    # From the snapshot at 128 one-token forwards go on as they did.
    rig.save_elsewhere(whole, 128)
    grown = np.concatenate([tokens, np.array(outcome.output[:29], dtype=np.int32)])
    again = rig.run(rig.record(grown, 31, 128, shift=ELSEWHERE)).outcome
    assert (again.output, again.logprobs) == (outcome.output[29:], outcome.logprobs[29:])


def test_a_record_continues_what_the_live_slot_holds(loaded: Loaded) -> None:
    rig, tokens = Rig(loaded), prompt(3 * GRID + 5)
    whole = rig.run(rig.record(tokens, 5)).outcome
    rig.run(rig.record(tokens[: 2 * GRID], 1))
    rest = rig.record(tokens, 5, 2 * GRID)
    rest = replace(rest, resume=dict.fromkeys(rest.resume, -1))
    assert rig.run(rest).outcome == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family: str, tmp_path: Path) -> None:
    loaded = load(family, tmp_path, "bfloat16")
    tokens = prompt(2 * GRID + 9)
    cold, resumed = Rig(loaded).cold_and_resumed(tokens, 4, GRID)
    assert resumed == cold
    assert cold.outcome == plain(loaded.model, tokens, 4)
