"""What the engine and its loader refuse, in words; and that a failed request harms no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from hicache_ray.errors import ConfigError, UnsupportedModel
from hicache_ray.integrations.transformers import Engine, Loaded, build, chunks, make_weights
from hicache_ray.records import Compute
from tests.engine.rig import GRID, PAGE, Rig, load, prompt

pytestmark = pytest.mark.model
COUNT = 2 * GRID + 9


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    torch.set_num_threads(1)
    return load("qwen3_5", tmp_path_factory.mktemp("qwen3_5"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load("gemma3", tmp_path_factory.mktemp("gemma3"))


def _without_page(record: Compute, name: str, page: int) -> Compute:
    table = record.tables[name].copy()
    table[page] = -1
    return replace(record, tables={**record.tables, name: table})


def test_chunks_end_on_the_absolute_grid() -> None:
    assert list(chunks(0, 150, 64)) == [(0, 64), (64, 128), (128, 150)]
    assert list(chunks(70, 128, 64)) == [(70, 128)]
    assert list(chunks(64, 65, 64)) == [(64, 65)]
    assert list(chunks(5, 500, 0)) == [(5, 500)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tables": {}}, "no table for component 'full'"),
        ({"tables": {"full": np.arange(3, dtype=np.int32)}}, "no slot for page 3"),
        ({"tables": {"full": np.full(12, 99, dtype=np.int32)}}, "slot 99 of component 'full', whose pool has 64"),
        ({"live": {}}, "no live slot for component 'state'"),
        ({"live": {"state": -1}}, "slot -1 of component 'state'"),
        ({"start": 64, "feed": prompt(9)}, "without a snapshot of component 'state'"),
        ({"snapshots": {"state": ((65, 3),)}}, "snapshot at length 65, where no forward ends"),
        ({"steps": 0}, "at least one token to feed and one step"),
        ({"feed": np.empty(0, dtype=np.int32)}, "at least one token to feed"),
        ({"feed": np.array([5, 512], dtype=np.int32)}, "token 512; the model knows tokens 0 to 511"),
    ],
)
def test_a_record_that_cannot_be_executed_is_an_error_and_the_next_one_runs(hybrid: Loaded, change: dict[str, Any], words: str) -> None:
    rig = Rig(hybrid)
    good = rig.record(prompt(COUNT), 3)
    before = rig.run(good)
    outcome = rig.engine.run(replace(good, **change))
    assert words in outcome.error
    assert outcome.output == ()
    assert rig.run(good) == before


def test_a_window_page_that_is_read_must_have_a_slot(windowed: Loaded) -> None:
    rig = Rig(windowed)
    good = rig.record(prompt(COUNT), 3)
    before = rig.run(good)
    # The window of the token at 130 begins at 35, in page 2; pages before it are read by the chunk at 64.
    assert "needs tokens [0, 64) of component 'window'" in rig.engine.run(_without_page(good, "window", 3)).error
    # The last page is written by the last chunk and read by the decode steps.
    assert "no slot for page 8" in rig.engine.run(_without_page(good, "window", 8)).error
    assert rig.run(good) == before


@pytest.mark.parametrize(("count", "steps", "page"), [(COUNT, 1, 0), (2 * GRID, 2, 2 * GRID // PAGE)])
def test_a_window_page_that_nobody_reads_is_not_written(windowed: Loaded, count: int, steps: int, page: int) -> None:
    """In one chunk the window reads no page, and the last token's page is read by later requests only; no other slot is touched."""
    rig = Rig(windowed)
    whole = rig.record(prompt(count), steps, grid=0)
    want = rig.run(whole)
    pool = rig.pools["window"]
    pool.buffer.fill_(255)
    part = _without_page(whole, "window", page)
    got = rig.run(part)
    assert got.outcome == want.outcome
    assert got.digests == {k: v for k, v in want.digests.items() if k != ("window", (page + 1) * PAGE)}
    written = {slot for slot in range(pool.slots) if not bool((pool.rows("k")[slot] == 255).all())}
    assert written == {int(slot) for slot in part.tables["window"] if slot >= 0}


def test_a_forward_that_fails_leaves_the_engine_usable(hybrid: Loaded) -> None:
    rig = Rig(hybrid)
    good = rig.record(prompt(COUNT), 3)
    before = rig.run(good)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    hook = hybrid.model.model.layers[2].register_forward_pre_hook(fail)
    outcome = rig.engine.run(good)
    hook.remove()
    assert outcome.error == "the forward of request 'request' failed: RuntimeError: out of memory"
    assert rig.run(good) == before


def test_an_engine_needs_a_pool_per_component(hybrid: Loaded) -> None:
    rig = Rig(hybrid)
    with pytest.raises(ConfigError, match="component 'state' of the cache spec needs a device pool"):
        Engine(hybrid.model, hybrid.spec, {"full": rig.pools["full"]})


def test_weights_are_the_same_for_the_same_seed(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    files = [make_weights("gemma3_text", tmp_path / str(i), seed=seed) / "model.safetensors" for i, seed in enumerate((1, 1, 2))]
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    assert torch.equal(state, torch.random.get_rng_state())


def test_unknown_and_refused_families(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match='model type "llama9" is not known; choose one of qwen3, gemma3_text, qwen3_5_text'):
        make_weights("llama9", tmp_path)
    with pytest.raises(UnsupportedModel, match='"jamba" is refused: its upstream code ignores the cached state'):
        make_weights("jamba", tmp_path)
    with pytest.raises(ConfigError, match='size is "huge"; choose one of demo, tiny'):
        make_weights("qwen3", tmp_path, "huge")


def test_a_folder_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    """None of these folders holds a weight."""
    with pytest.raises(ConfigError, match="holds no config"):
        build(tmp_path, PAGE)
    AutoConfig.for_model("olmo2").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match='"olmo2" is not known'):
        build(tmp_path, PAGE)
    AutoConfig.for_model("gemma3_text", use_bidirectional_attention=True).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="depends on the tokens that follow"):
        build(tmp_path, PAGE)
    AutoConfig.for_model("qwen3", num_key_value_heads=2, intermediate_size=3071).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.tp is 4, which does not divide the 2 key-value heads"):
        build(tmp_path, PAGE, world=4)
    with pytest.raises(ConfigError, match=r"model\.tp is 2, which does not divide the intermediate_size 3071"):
        build(tmp_path, PAGE, world=2)
    with pytest.raises(ConfigError, match=r'model\.dtype is "int4"'):
        build(tmp_path, PAGE, "int4")


def test_a_folder_without_all_weights_is_refused(tmp_path: Path) -> None:
    file = make_weights("qwen3", tmp_path) / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights of \"qwen3\" \(model.layers.1.mlp.up_proj.weight"):
        build(tmp_path, PAGE)


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match='model.device is "cuda", and no GPU is visible to this rank; choose cpu'):
        build(make_weights("qwen3", tmp_path, "tiny"), 64, device="cuda")
