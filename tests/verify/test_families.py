"""A model of every kind of component through all of verify."""

from __future__ import annotations

import pytest

from hicache_ray.verify.replica import Replica
from hicache_ray.verify.result import CHECKS, Verdict
from hicache_ray.verify.run import Options, run

pytestmark = pytest.mark.model
#: full; window; chunked; latent and rope key (MLA); MLA and an indexer's keys; entries at two ratios with tails; states alone; keys, values
#: and states in one layer; a model whose decode leaves other states than its prefill.
KINDS = ("llama", "mistral", "llama4", "deepseek_v3", "deepseek_v32", "deepseek_v4", "mamba2", "falcon_h1", "zamba2")


@pytest.mark.parametrize("family", KINDS)
def test_a_family_passes(family: str) -> None:
    said: list[str] = []
    result = run(Options((family,)), said.append)
    assert (result.passed, result.problems) == (True, ())
    assert len(result.cells) == 16
    assert [c.verdict for c in result.checks] == [Verdict.PASSED] * (16 + 3)
    assert {c.note for c in result.of(family, "restore")} == {"256 of 301 tokens reused"}
    assert said == [f"{family}: {text}" for text in ("loading", "restore, 16 cells", *list(CHECKS)[1:])]
    branching = result.of(family, "branching")[0].note
    assert branching.startswith("18 requests, hits of ")
    assert " host " in branching
    inexact = result.of(family, "inexact")[0].note
    states = family in ("deepseek_v4", "mamba2", "falcon_h1", "zamba2")
    assert inexact.startswith(f"resumed at {128 if states else 160}, decoded from 100 on; logprobs within ")
    assert " of a recompute" in inexact
    assert ("as without the tier: its upstream code limits the time step" in inexact) == (family == "zamba2")


def test_bfloat16_is_exact_as_well_and_closeness_is_not_judged() -> None:
    """Two families of which decode and prefill round to other tokens."""
    result = run(Options(("qwen3_moe", "mistral"), dtype="bfloat16", checks=("restore", "chunked", "inexact")))
    assert (result.passed, result.problems) == (True, ())
    for family in result.models:
        assert result.of(family, "chunked")[0].verdict is Verdict.NOT_RUN
        assert result.of(family, "inexact")[0].note.endswith("as without the tier: bfloat16 rounds too much to judge")


def test_a_model_that_fails_does_not_end_the_run() -> None:
    """A prompt that does not fit its own pools, say; here a check that loses its storage."""

    def close(replica: Replica, _: object) -> None:
        replica.store.close()

    result = run(Options(("llama",), wanted={"layout": ["page_head"], "write_policy": ["write_back"]}, interfere=close))
    assert not result.passed
    assert [c.verdict for c in result.of("llama", "chunked")] == [Verdict.PASSED]
    assert any(p.startswith("llama, restore: StoreClosed: ") for p in result.problems), result.problems
