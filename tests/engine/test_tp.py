"""Two tensor-parallel ranks in two processes: one answer, two shards; and groups that break and are made anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hicache_ray.errors import GroupLost
from hicache_ray.integrations.transformers import TpConfig, build, join, make_weights
from tests.engine.ranks import Rank, ask, free_port
from tests.engine.rig import FAMILIES, GRID, PAGE, Rig, prompt

pytestmark = pytest.mark.model
COUNT, STEPS = 3 * GRID + 20, 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    return {family: make_weights(family, tmp_path_factory.mktemp(family), seed=3) for family in FAMILIES}


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path]) -> Iterator[list[Rank]]:
    both = [Rank.start(rank, 2) for rank in range(2)]
    ask(both, "join", free_port(), 20.0)
    for family, folder in folders.items():
        ask(both, "build", family, str(folder))
    yield both
    for rank in both:
        rank.stop()


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_one_answer_from_two_shards(ranks: list[Rank], folders: dict[str, Path], family: str) -> None:
    first, second = ask(ranks, "cold", family, COUNT, STEPS)
    # Bit for bit: logprobs are made of all logits.
    assert first.outcome == second.outcome
    rig = Rig(build(folders[family], PAGE))
    whole = rig.run(rig.record(prompt(COUNT), STEPS)).outcome
    assert first.outcome.output == whole.output
    np.testing.assert_allclose(first.outcome.logprobs, whole.logprobs, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_resumed_equals_cold_on_both_ranks(ranks: list[Rank], family: str) -> None:
    answers = ask(ranks, "cold_and_resumed", family, COUNT, STEPS, 2 * GRID)
    for cold, resumed in answers:
        assert resumed == cold
    (one, _), (two, _) = answers
    assert one.digests.keys() == two.digests.keys()
    # Really shards: no page and no snapshot is the same on both.
    assert one.digests
    assert not set(one.digests.values()) & set(two.digests.values())


def test_a_shard_has_half_the_bytes(folders: dict[str, Path]) -> None:
    whole, half = (build(folders["qwen3_5"], PAGE, world=world).spec for world in (1, 2))
    for c in whole.components:
        assert half[c.name].page_bytes(PAGE) * 2 == c.page_bytes(PAGE)


def test_a_forward_outside_a_group_is_refused(folders: dict[str, Path]) -> None:
    rig = Rig(build(folders["qwen3"], PAGE, rank=0, world=2))
    with pytest.raises(GroupLost, match=r"call join\(\) on every rank"):
        rig.engine.run(rig.record(prompt(5), 1))


def test_a_rank_that_is_alone_gives_up() -> None:
    with pytest.raises(GroupLost, match="rank 0 of 2 did not meet the others at tcp:"):
        join(TpConfig(0, 2, free_port(), startup_timeout_s=1))


def test_a_frozen_and_a_killed_rank(ranks: list[Rank], folders: dict[str, Path]) -> None:
    """The other rank's forward ends with GroupLost; the processes that live go on in a new group with the model they have."""
    want = ask(ranks, "cold", "qwen3_5", COUNT, STEPS)
    ask(ranks, "leave")
    ask(ranks, "join", free_port(), 1.0)
    # Frozen: rank 1 never calls its forward.
    ranks[0].tell("cold", "qwen3_5", COUNT, STEPS)
    assert "GroupLost: another rank of the group died or froze" in ranks[0].answer()[1]
    ask(ranks, "leave")
    ask(ranks, "join", free_port(), 20.0)
    assert ask(ranks, "cold", "qwen3_5", COUNT, STEPS) == want
    # Killed.
    ranks[1].kill()
    ranks[0].tell("cold", "qwen3_5", COUNT, STEPS)
    assert "GroupLost: another rank of the group died or froze" in ranks[0].answer()[1]
    ask(ranks[:1], "leave")
    ranks[1] = Rank.start(1, 2)
    ask(ranks, "join", free_port(), 20.0)
    ask(ranks[1:], "build", "qwen3_5", str(folders["qwen3_5"]))
    assert ask(ranks, "cold", "qwen3_5", COUNT, STEPS) == want
