"""Tensor parallelism over gloo (first cut: one rank)."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def check(config: Any, rank: int, world: int) -> None:
    pass


def shard(model: PreTrainedModel, rank: int, world: int) -> None:
    pass
