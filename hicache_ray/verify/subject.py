"""What is verified: a model, the sizes of the run, and the store of all its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hicache_ray.errors import ConfigError, UnsupportedModel
from hicache_ray.families import FAMILIES, canonical_type
from hicache_ray.integrations.transformers import Loaded, build, make_weights, read_config
from hicache_ray.keys import Namespace
from hicache_ray.records import Tokens
from hicache_ray.settings import Settings, WritePolicy
from hicache_ray.spec import CacheSpec
from hicache_ray.store import Store
from hicache_ray.story import Request

#: Storage takes longer on a busy machine than a deployment would wait; what verify asks is not how fast it is.
STORAGE_S = 60.0
DTYPES = ("float32", "bfloat16")
#: Logprobs of two ways to compute the same in float32 may differ by this much.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Sizes:
    """Tokens: of a page, of the grid, of the prompt that is restored, of each answer."""

    page: int
    grid: int
    dtype: str
    new: int = 4

    def prompt(self, spec: CacheSpec) -> int:
        """Four chunks, or two steps where a step is longer, and a rest that is no multiple of anything."""
        return max(4 * self.grid, 2 * spec.step(self.grid)) + self.grid * 45 // 64


@dataclass(frozen=True)
class Subject:
    """A model with weights, and where its replicas meet."""

    name: str
    loaded: Loaded
    sizes: Sizes
    store: Store
    seed: int = 0

    @property
    def spec(self) -> CacheSpec:
        return self.loaded.spec

    def settings(self, policy: str = WritePolicy.WRITE_THROUGH.value, exact: bool = True, track: int | None = None) -> Settings:
        track = track or self.sizes.grid
        return Settings(
            grid=self.sizes.grid, exact=exact, write_policy=WritePolicy(policy), track_interval=track, prefetch_threshold=0,
            lookup_deadline_s=STORAGE_S, prefetch_base_s=STORAGE_S, prefetch_cap_s=STORAGE_S, copy_deadline_s=STORAGE_S,
        )  # fmt: skip

    def recipe(self) -> Mapping[str, str]:
        return {"grid": str(self.sizes.grid), "engine": "verify"}

    def request(self, rid: str, tokens: Tokens, world: str, new: int | None = None) -> Request:
        """``world``: requests of one world share pages."""
        namespace = Namespace(f"verify {self.name}", salt=world, page_size=self.sizes.page)
        return Request(rid, tokens, namespace, new or self.sizes.new)

    def tokens(self, count: int, *seed: int) -> Tokens:
        """A prompt that no other seed begins with."""
        vocabulary = int(self.loaded.model.config.get_text_config(decoder=True).vocab_size)
        return np.random.default_rng([self.seed, *seed]).integers(3, vocabulary, count).astype(np.int32)


def require(name: str) -> None:
    """Raises :class:`ConfigError` unless ``name`` is a family, or the folder of a saved model whose family is known; UnsupportedModel with
    the reason for what is refused."""
    if is_folder(name):
        canonical_type(read_config(name).model_type)
    elif "/" in name:
        raise ConfigError(f'--model is "{name}", and there is no such folder; give the folder of a saved model, or a family')
    else:
        canonical_type(name)


def load(name: str, sizes: Sizes, folder: Path, seed: int = 0) -> Loaded:
    """The model called ``name``: of a family a tiny one with random weights is made in ``folder``. Raises as :func:`require`, or build."""
    path = Path(name) if is_folder(name) else make_weights(name, folder, "tiny", seed, sizes.dtype)
    return build(path, sizes.page, sizes.dtype)


def is_folder(name: str) -> bool:
    """Whether ``name`` is a folder and not a family; ``./name`` always is."""
    try:
        return canonical_type(name) not in FAMILIES
    except UnsupportedModel:
        return Path(name).is_dir()
