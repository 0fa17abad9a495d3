"""Every model family through the tier's pools: the same bits as transformers' own cache, cold and resumed; and what must not pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hicache_ray.errors import ConfigError, UnsupportedModel
from hicache_ray.families import FAMILIES, REFUSED, canonical_type, spec_from_config
from hicache_ray.integrations.transformers import Loaded, make_weights
from hicache_ray.integrations.transformers.cover import check_covered
from hicache_ray.integrations.transformers.sizes import COMMON, SIZES
from hicache_ray.records import Outcome
from hicache_ray.spec import CacheSpec, Component, Kind
from tests.engine.rig import ELSEWHERE, GRID, PAGE, Rig, load, plain, prompt

pytestmark = pytest.mark.model
COUNT, STEPS = 4 * GRID + 45, 6
#: At a multiple of its ratio a compressor without overlap has nothing left over: its snapshots are zeros there.
EMPTY_AT_THE_GRID = "hca_tail"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(request.param, tmp_path_factory.mktemp(request.param))


def difference(a: Outcome, b: Outcome) -> float:
    return max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True))


@pytest.mark.parametrize("count", [1, COUNT])
def test_a_cold_run_equals_transformers_own_cache(loaded: Loaded, count: int) -> None:
    rig = Rig(loaded)
    assert rig.run(rig.record(prompt(count), STEPS)).outcome == plain(loaded.model, prompt(count), STEPS)


@pytest.mark.parametrize("start", [GRID, 3 * GRID, 4 * GRID])
def test_resuming_at_a_grid_boundary_gives_the_same_bits(loaded: Loaded, start: int) -> None:
    """Logprobs hold all logits; pages and snapshots made after the resume are compared too. All else was wiped to 0xFF."""
    cold, resumed = Rig(loaded).cold_and_resumed(prompt(COUNT), STEPS, start)
    assert resumed == cold
    assert cold.outcome == plain(loaded.model, prompt(COUNT), STEPS)
    paged = [c for c in loaded.spec.components if not c.is_state]
    # At 256 the last chunk makes whole pages of 16, but of a page of 32 tokens and a snapshot there may be none.
    made = {name for name, _ in cold.digests}
    assert made >= {c.name for c in (loaded.spec.components if start < 4 * GRID else paged)}
    assert len(set(cold.outcome.output)) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family: str, tmp_path: Path) -> None:
    loaded = load(family, tmp_path, "bfloat16")
    tokens = prompt(2 * GRID + 9)
    cold, resumed = Rig(loaded).cold_and_resumed(tokens, 4, GRID)
    assert resumed == cold
    assert cold.outcome == plain(loaded.model, tokens, 4)


def test_every_component_is_read(loaded: Loaded) -> None:
    """Zeros in the place of what a component has saved must show; else the resume above says nothing of it."""
    for c in loaded.spec.components:
        rig = Rig(loaded)
        cold = rig.record(prompt(COUNT), STEPS, snapshots=range(GRID, COUNT, GRID))
        want = rig.run(cold).after(GRID)
        rig.save_elsewhere(cold, GRID)
        rig.pools[c.name].buffer.zero_()
        got = rig.run(rig.record(prompt(COUNT), STEPS, GRID, range(GRID, COUNT, GRID), ELSEWHERE)).after(GRID)
        same = got == want
        assert same == (c.name == EMPTY_AT_THE_GRID), c.name


def forget_pages(rig: Rig) -> None:
    for table in rig.engine.tables.values():
        table.past = table.skip = table.blank = 0
        table.read = table.slots[:0]


def forget_states(rig: Rig) -> None:
    for layers in rig.engine.cache.states.values():
        for layer in layers:
            layer.load(0, 0)


@pytest.mark.parametrize("forget", [forget_pages, forget_states])
def test_chunked_agrees_with_one_shot_and_a_model_that_ignores_its_cache_does_not(loaded: Loaded, forget: Callable[[Rig], None]) -> None:
    rig, tokens = Rig(loaded), prompt(COUNT)
    whole = rig.run(rig.record(tokens, 1, grid=0)).outcome
    assert difference(rig.run(rig.record(tokens, 1)).outcome, whole) < 1e-4
    if not (rig.engine.tables if forget is forget_pages else rig.engine.cache.states):
        return
    hook = loaded.model.register_forward_pre_hook(lambda *_: forget(rig))
    try:
        assert difference(rig.run(rig.record(tokens, 1)).outcome, whole) > 1e-4
    finally:
        hook.remove()


# -- refused ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", REFUSED)
def test_refused_with_the_reason(family: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f'model type "{family}" is refused: its? .*; choose one of qwen3'):
        make_weights(family, tmp_path)


@pytest.mark.parametrize(("family", "sizes"), [
    ("mamba", {"hidden_size": 128, "num_hidden_layers": 3, "state_size": 16}),
    ("jamba", {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
               "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False}),
])  # fmt: skip
def test_the_reason_still_holds(family: str, sizes: dict[str, Any]) -> None:
    """Once transformers continues these right, they need not be refused any more."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON, **sizes)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and "conv" not in name and "A_log" not in name:
                weight.normal_(std=weight.shape[-1] ** -0.5)
    assert difference(plain(model, prompt(150), 3), plain(model, prompt(150), 3, grid=0)) > 1e-4


@pytest.mark.parametrize("family", [name for name, f in FAMILIES.items() if not f.tp])
def test_families_of_one_rank_say_so(family: str) -> None:
    with pytest.raises(
        ConfigError, match=rf'model\.tp is 2, but "{family}" runs on one rank only; set model\.tp to 1 or choose one of qwen3'
    ):
        spec_from_config(config_of(family), PAGE, ranks=2)


def config_of(family: str) -> Any:
    return AutoConfig.for_model(family, **COMMON, **SIZES[family, "tiny"])


# -- a spec must cover the model ----------------------------------------------------------------------------------------------------


def without(spec: CacheSpec, component: str) -> CacheSpec:
    return replace(spec, components=tuple(c for c in spec.components if c.name != component))


def changed(spec: CacheSpec, component: str, **changes: Any) -> CacheSpec:
    return replace(spec, components=tuple(replace(c, **changes) if c.name == component else c for c in spec.components))


def wider(c: Component) -> Any:
    """The fields with the first one twice as wide."""
    first, *rest = c.fields
    return (replace(first, width=2 * first.width, shape=(2 * first.shape[0], *first.shape[1:])), *rest)


def test_a_spec_that_lacks_any_component_is_refused(loaded: Loaded) -> None:
    check_covered(loaded.model, loaded.spec)
    for c in loaded.spec.components:
        lacking = [without(loaded.spec, c.name)] if len(loaded.spec.components) > 1 else []
        for spec in (*lacking, changed(loaded.spec, c.name, fields=wider(c))):
            with pytest.raises(ConfigError, match=rf'layer {c.layers[0]} of "{loaded.spec.model_type}" \(\w+\) keeps'):
                check_covered(loaded.model, spec)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    made: dict[str, Loaded] = {}

    def get(family: str) -> Loaded:
        if family not in made:
            made[family] = load(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


WRONG: list[tuple[str, Callable[[CacheSpec], CacheSpec], str]] = [
    (
        "deepseek_v32",
        lambda s: without(s, "index"),
        r"layer 0 .* \(DynamicIndexedLayer\) keeps indexer_keys of shape \(1, 2, 40\), which no component",
    ),
    ("glm_moe_dsa", lambda s: changed(s, "index", layers=(0, 1, 2)), r"layer 1 .* \(DynamicIndexedLayer\) does not keep indexer_keys"),
    (
        "inkling_text",
        lambda s: changed(s, "window_state", fields=s["window_state"].fields[:3]),
        r"\(LinearAttentionAndSlidingWindowAttentionLayer\) keeps conv_states\[3\]",
    ),
    (
        "mistral",
        lambda s: changed(s, "window", reach=64),
        r"\(DynamicSlidingWindowLayer\) keeps a window of 96 tokens, but component 'window' .* reach of 64",
    ),
    ("mistral", lambda s: changed(s, "window", kind=Kind.FULL), r"keeps a window of 96 tokens, but component 'window' .* is full"),
    ("llama", lambda s: changed(s, "full", kind=Kind.WINDOW, reach=95), r"\(DynamicLayer\) keeps all tokens, but .* is window"),
    (
        "deepseek_v4",
        lambda s: changed(s, "csa", ratio=8),
        r"layer 1 .* \(DeepseekV4CSACache\) keeps compressed_kv\['compressor'\] as float32\[1, 8, 64\], but",
    ),
    (
        "bamba",
        lambda s: spec_from_config(config_of("bamba"), PAGE, 1, "bfloat16"),
        r"keeps conv_states\[0\] as float32\[1, 288, 4\], but component 'state'",
    ),
]


@pytest.mark.parametrize(("family", "change", "words"), WRONG)
def test_what_is_wrong_with_a_spec_is_said(
    models: Callable[[str], Loaded], family: str, change: Callable[[CacheSpec], CacheSpec], words: str
) -> None:
    loaded = models(family)
    with pytest.raises(ConfigError, match=words):
        check_covered(loaded.model, change(loaded.spec))


def test_a_layer_type_without_a_component_is_refused() -> None:
    config = config_of("llama")
    config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match='layer 1 of "llama" is of type "linear_attention", which its family has no component for'):
        spec_from_config(config, PAGE)
    config = config_of("gpt_oss")
    config.sliding_window = None
    with pytest.raises(ConfigError, match='configuration of "gpt_oss" has no sliding_window - 1, which its cache spec needs'):
        spec_from_config(config, PAGE)


def test_layers_of_unlike_sizes_are_components_of_their_own() -> None:
    config = AutoConfig.for_model("llama", **COMMON, **SIZES["llama", "tiny"], per_layer_config={1: {"num_key_value_heads": 4}})
    spec = spec_from_config(config, PAGE)
    assert [(c.name, c.layers, c.fields[0].heads) for c in spec.components] == [("full", (0, 2), 2), ("full.2", (1,), 4)]
    assert canonical_type("llama_text") == "llama"


@pytest.mark.parametrize(("layout", "offset"), [("layer_first", 0), ("page_first", 4), ("page_head", 0), ("page_first_direct", 12)])
@pytest.mark.parametrize("family", ["mimo_v2_flash", "deepseek_v32", "inkling_text", "deepseek_v4"])
def test_where_the_bytes_lie_does_not_matter(models: Callable[[str], Loaded], family: str, layout: str, offset: int) -> None:
    """K and V of unlike width, fields without heads, states of several dtypes: in every layout, and in memory that is not aligned."""
    loaded, tokens, boundaries = models(family), prompt(2 * GRID + 9), range(GRID, 3 * GRID, GRID)
    straight, shuffled = Rig(loaded, shuffled=False), Rig(loaded, layout=layout, offset=offset)
    one = straight.run(straight.record(tokens, 4, snapshots=boundaries))
    two = shuffled.run(shuffled.record(tokens, 4, snapshots=boundaries))
    assert one == two
    assert one.digests
