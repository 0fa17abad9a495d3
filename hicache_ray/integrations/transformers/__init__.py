"""The engine on Hugging Face transformers: models whose caches live in the tier's device pools."""

from hicache_ray.integrations.transformers.engine import Engine, Ran, chunks
from hicache_ray.integrations.transformers.models import Loaded, build, make_weights, read_config
from hicache_ray.integrations.transformers.tp import TpConfig, join, leave, shard

__all__ = [
    "Engine",
    "Loaded",
    "Ran",
    "TpConfig",
    "build",
    "chunks",
    "join",
    "leave",
    "make_weights",
    "read_config",
    "shard",
]
