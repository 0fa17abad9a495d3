"""A plan of all tiers for one model: what ``hicache-ray size`` prints. Given numbers in, a frozen plan out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hicache_ray import sizing
from hicache_ray.errors import ConfigError
from hicache_ray.settings import Settings
from hicache_ray.spec import CacheSpec


@dataclass(frozen=True)
class Budget:
    """Bytes: of one rank's ``device`` and ``host`` pools, and of ``storage`` on a node (0: none). ``ranks``: on a node."""

    device: int
    host: int
    storage: int
    ranks: int


@dataclass(frozen=True)
class Row:
    """A component. ``per_token``: bytes of a token on one rank, 0 for a state; ``per_snapshot``: bytes of a snapshot, 0 for pages;
    slots in the pools of one rank."""

    name: str
    kind: str
    layers: int
    per_token: float
    per_snapshot: int
    device_slots: int
    host_slots: int


@dataclass(frozen=True)
class SizePlan:
    """``device_tokens``, ``device_snapshots``: the settings that give these device pools. ``largest``: the longest prompt, in tokens,
    that the device can run and that the host can restore. ``tokens``: how many tokens' worth of such prompts a tier holds."""

    rows: tuple[Row, ...]
    budget: Budget
    device_bytes: int
    host_bytes: int
    host_restorable: int
    device_tokens: int
    device_snapshots: int
    largest: Mapping[str, int]
    tokens: Mapping[str, int]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan(spec: CacheSpec, settings: Settings, budget: Budget, tokens: int | None, mix: sizing.Mix) -> SizePlan:
    """Pools for these budgets. ``mix``: what the deployment accepts; ``tokens``: the prompt to plan for, None for all of it."""
    of = mix if tokens is None else sizing.Mix(tokens, tokens)
    device, snapshots = device_slots(spec, settings, budget.device, of.longest)
    host = sizing.split(spec, settings, budget.host, of)
    unit = sizing.prompt_bytes(spec, settings, of.longest)
    size = {c.name: c.page_bytes(spec.page_size) for c in spec.components}
    in_device = sum(size[name] * n for name, n in device.items())
    rows = tuple(
        Row(
            c.name, c.kind.value, len(c.layers), 0.0 if c.is_state else size[c.name] / (spec.page_size * c.page_span),
            size[c.name] if c.is_state else 0, device[c.name], host.slots[c.name],
        )
        for c in spec.components
    )  # fmt: skip
    # A request also holds the state that runs, and the snapshot that it resumes from.
    usable = {c.name: max(0, device[c.name] - 2) if c.is_state else device[c.name] for c in spec.components}
    largest = {
        "device": sizing.longest_prompt(spec, settings, usable),
        "host": sizing.longest_prompt(spec, settings, host.slots),
    }
    for tier, bytes_of in (("device", budget.device), ("host", budget.host)):
        if not largest[tier]:
            step = settings.step(spec)
            least = sizing.prompt_bytes(spec, settings, max(step, of.shortest)) + (2 * spec.snapshot_bytes() if tier == "device" else 0)
            raise ConfigError(
                f"the {bytes_of:,} bytes of a rank's {tier} pools hold no prompt at all; one of {max(step, of.shortest)} tokens takes "
                f"{least:,}, and these pools are for prompts of up to {of.longest}: give them more, or plan for shorter prompts"
            )
    held = {"device": in_device, "host": host.restorable, "storage": budget.storage // max(1, budget.ranks)}
    worth = {tier: n * of.longest // unit for tier, n in held.items()}
    told = list(sizing.warnings(spec, settings, of.longest, in_device, host.size))
    for tier, longest in largest.items():
        if tokens is not None and longest < tokens // settings.step(spec) * settings.step(spec):
            told.append(f"the {tier} pools hold prompts of up to {longest} tokens, less than the {tokens} that are planned for")
    tokens_setting = min(device[c.name] * c.page_span for c in spec.components if not c.is_state) * spec.page_size if _paged(spec) else 0
    return SizePlan(rows, budget, in_device, host.size, host.restorable, tokens_setting, snapshots, largest, worth, tuple(told))


def device_slots(spec: CacheSpec, settings: Settings, budget: int, tokens: int) -> tuple[Mapping[str, int], int]:
    """Slots of the device pools for prompts of ``tokens`` tokens, and snapshots among them: a running request makes those that are kept
    of it, and has a running state and what it resumed from beside them."""
    spare = 2 * spec.snapshot_bytes()
    slots = sizing.split(spec, settings, max(1, budget - spare), sizing.Mix(tokens, tokens)).slots
    out = {c.name: slots[c.name] + (2 if c.is_state and budget > spare else 0) for c in spec.components}
    return out, max((out[c.name] for c in spec.components if c.is_state), default=0)


def _paged(spec: CacheSpec) -> bool:
    return any(not c.is_state for c in spec.components)
