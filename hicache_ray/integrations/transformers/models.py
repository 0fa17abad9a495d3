"""Models for the engine: local folders with random weights to try it, and loading of any folder whose family is known.

Nothing is downloaded. A folder is read by transformers (configuration and safetensors); what does not fit is refused before a weight is
read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hicache_ray.errors import ConfigError
from hicache_ray.families import canonical_type, family_of, spec_from_config
from hicache_ray.integrations.transformers import tp
from hicache_ray.integrations.transformers.cover import check_covered
from hicache_ray.integrations.transformers.sizes import COMMON, SIZES
from hicache_ray.spec import CacheSpec


@dataclass(frozen=True)
class Loaded:
    """A model ready to run and the caches it keeps, both as this rank holds them."""

    model: PreTrainedModel
    spec: CacheSpec


def make_weights(family: str, directory: str | Path, size: str = "tiny", seed: int = 0, dtype: str = "float32", **changes: object) -> Path:
    """Save a model of ``family`` ("qwen3", "gemma3", ...; a "_text" suffix may be given) with random weights.

    Returns the folder. The same arguments give the same weights. Every family has the size "tiny"; ``changes`` to its configuration may
    be given. Raises :class:`ConfigError` for an unknown size or dtype, UnsupportedModel for the family.
    """
    model_type = canonical_type(family)
    if (model_type, size) not in SIZES:
        have = ", ".join(sorted(s for name, s in SIZES if name == model_type))
        raise ConfigError(f'model size is "{size}"; choose one of {have} for "{model_type}"')
    config = AutoConfig.for_model(model_type, **{**COMMON, **SIZES[model_type, size], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=_dtype(dtype))
        _scale_up(model, seed + 1)
    folder = Path(directory)
    model.save_pretrained(folder)
    return folder


def _scale_up(model: PreTrainedModel, seed: int) -> None:
    """Weights of unit gain: those of the default initialisation give nearly flat logits, whose argmax means nothing, and convolutions
    that see little but the last token, so that a lost conv state would hardly show."""
    generators = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and "A_log" not in name:
                generator = generators["conv" in name]
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)


def read_config(folder: str | Path) -> Any:
    """The text configuration of a model folder. Raises :class:`ConfigError` where there is none."""
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f'model.path is "{folder}", which holds no config.json; give the folder of a saved model')
    return AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)


def build(folder: str | Path, page_size: int, dtype: str = "float32", rank: int = 0, world: int = 1, device: str = "cpu") -> Loaded:
    """Load the model of ``folder`` as rank ``rank`` of ``world`` runs it, with its cache spec. The process group is not needed yet.

    Raises :class:`ConfigError` (a model that ``world`` does not divide, a folder without the weights, a cache that the spec does not
    cover, a device that this process does not see) or UnsupportedModel.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f'model.device is "{device}", and no GPU is visible to this rank; choose cpu, or run on a node with a free GPU')
    config = read_config(folder)
    spec = spec_from_config(config, page_size, world, dtype)
    tp.check(config, rank, world)
    attention = family_of(config.model_type).attention
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=_dtype(dtype), attn_implementation=attention, local_files_only=True, output_loading_info=True
    )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f'model.path is "{folder}", which lacks {len(missing)} weights of "{config.model_type}" ({missing[0]}, ...); '
            "give the complete folder of a text model"
        )
    check_covered(model.eval(), spec_from_config(config, page_size, 1, dtype))
    tp.shard(model, rank, world)
    return Loaded(model.to(device), spec)


def _dtype(name: str) -> torch.dtype:
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f'model.dtype is "{name}"; choose one of float32, bfloat16, float16')
    found: torch.dtype = getattr(torch, name)
    return found
