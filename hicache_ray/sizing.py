"""How much memory goes to which pool, and what a tier can hold. Arithmetic only: memory and specs are given, nothing is asked of a machine.

The split between a host's pools follows from what is to be *restorable*, not from how a device is split. A prompt takes some slots of every
pool (:func:`footprint`). Of all splits of one budget, :func:`split` gives the one under which the most prompts, of whatever lengths of a
range and in whatever number, are restorable as a whole: with ``r`` the most slots of a pool that a byte of such prompts can ask for, slots
in proportion to ``r``. Where all prompts ask for the same, that is the whole budget; where a few long and many short ones ask for unlike
things (``state_snapshots: last``), what is left over is told (:attr:`Split.restorable`). Which snapshots of a path are kept is the
settings' (``state_snapshots``), and :func:`hicache_ray.lengths.kept_snapshots` says it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from hicache_ray import lengths
from hicache_ray.errors import ConfigError
from hicache_ray.settings import Settings, StateSnapshots
from hicache_ray.spec import CacheSpec, Component

#: Of a prompt that is planned for.
MOST_TOKENS = 1 << 26
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mix:
    """Prompts that a pool is planned for: from ``shortest`` to ``longest`` tokens."""

    shortest: int
    longest: int

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ConfigError(f"a mix of prompts of {self.shortest} to {self.longest} tokens makes no sense; give the shorter one first")
        if self.longest > MOST_TOKENS:
            raise ConfigError(f"prompts of {self.longest} tokens are longer than any model runs; plan for at most {MOST_TOKENS}")


@dataclass(frozen=True)
class Split:
    """Slots of each component. A set of prompts of the mix that together have at most ``restorable`` bytes (on one rank; what they share
    counts for each) finds room for all of it, whatever their lengths. ``size``: bytes of all slots."""

    slots: Mapping[str, int]
    size: int
    restorable: int


def footprint(spec: CacheSpec, settings: Settings, tokens: int) -> Mapping[str, int]:
    """Slots of each pool that a prompt's pages and snapshots take once they are cached."""
    made = _made(spec, settings, np.array([tokens], dtype=np.int64))
    return {name: int(counts[0]) for name, counts in made.items()}


def prompt_bytes(spec: CacheSpec, settings: Settings, tokens: int) -> int:
    """Bytes of that on one rank."""
    return sum(spec[name].page_bytes(spec.page_size) * n for name, n in footprint(spec, settings, tokens).items())


def split(spec: CacheSpec, settings: Settings, budget: int, mix: Mix) -> Split:
    """The split of ``budget`` bytes of one rank. Raises :class:`ConfigError` where the prompts are too short to leave anything behind."""
    page = {c.name: c.page_bytes(spec.page_size) for c in spec.components}
    share = _most_per_byte(spec, settings, mix)
    if share is None:
        step = settings.step(spec)
        raise ConfigError(f"prompts of up to {mix.longest} tokens leave nothing to restore; plan for at least {step} tokens, one step")
    # Slots of c are restorable * share[c] rounded down: what prompts ask for is a whole number, so the fraction is never missed.
    restorable = int(budget / sum(page[name] * r for name, r in share.items()))
    slots = {name: int(restorable * r) for name, r in share.items()}
    return Split(slots, sum(page[name] * n for name, n in slots.items()), restorable)


def longest_prompt(spec: CacheSpec, settings: Settings, slots: Mapping[str, int]) -> int:
    """The longest prompt, in whole steps, that pools with these slots hold at once, as they do every shorter one; 0 where none is."""
    step, low = settings.step(spec), 0
    high = 1
    while _fits(spec, settings, slots, high * step):
        low, high = high, 2 * high
        if high * step > 1 << 40:
            break  # nothing in the spec grows with the prompt
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(spec, settings, slots, middle * step) else (low, middle)
    return low * step


def host_share(free: int, reserve: int, fraction: float, ranks: int) -> int:
    """Bytes for the host pools of each of a node's ranks: the same for all, since their pools follow one index.

    ``free``: memory that the node has left for us; ``reserve``: what stays free of it whatever happens; ``fraction``: of the rest.
    """
    if not 0 < fraction <= 1 or ranks < 1 or reserve < 0:
        raise ConfigError(f"a share of {fraction:g} of the memory for {ranks} rank(s), {reserve} bytes kept free, makes no sense")
    return int(max(0, free - reserve) * Fraction(str(fraction))) // ranks


@dataclass(frozen=True)
class Memory:
    """Of a machine, or of the control group that confines us there, in bytes. ``limit``: names the tightest bound on ``total``."""

    total: int
    free: int
    limit: str = "machine"


def confined(machine: Memory, groups: Iterable[Memory]) -> Memory:
    """The tightest of a machine and the control groups around us: a group's limit wins over a larger machine."""
    out = machine
    for group in groups:
        limit = group.limit if group.total < out.total else out.limit
        out = Memory(min(out.total, group.total), min(out.free, group.free), limit)
    return out


def warnings(spec: CacheSpec, settings: Settings, tokens: int, device: int, host: int) -> tuple[str, ...]:
    """What an operator should know of pools with ``device`` and ``host`` bytes, with prompts of ``tokens`` tokens in mind."""
    out = []
    taken = footprint(spec, settings, tokens)
    states = sum(spec[name].page_bytes(spec.page_size) * n for name, n in taken.items() if spec[name].is_state)
    pages = sum(spec[name].page_bytes(spec.page_size) * n for name, n in taken.items() if not spec[name].is_state)
    if states > pages:
        out.append(
            f"snapshots outweigh the KV: {states:,} against {pages:,} bytes of a prompt of {tokens} tokens; "
            "a larger cache.grid and cache.track_interval, or cache.state_snapshots log, makes fewer"
        )
    if host < device:
        out.append(
            f"the host pools ({host:,} bytes) are smaller than the device's ({device:,}): what leaves the device finds no room; "
            "raise cache.host_ratio or cache.host_size"
        )
    return tuple(out)


def _fits(spec: CacheSpec, settings: Settings, slots: Mapping[str, int], tokens: int) -> bool:
    """Whether prompts of up to ``tokens`` tokens each fit. One that ends with a snapshot may keep one more than longer ones do: that one
    cannot resume from its last."""
    strides = {_stride(c, spec, settings) for c in spec.components if c.is_state}
    ends = {tokens, *(tokens // stride * stride for stride in strides)}
    return all(n <= slots[name] for end in ends for name, n in footprint(spec, settings, end).items())


def _most_per_byte(spec: CacheSpec, settings: Settings, mix: Mix) -> Mapping[str, Fraction] | None:
    """Of each component the most slots per byte that a prompt of the mix takes; None where none of them takes anything."""
    # Pages and snapshots change where a page is full, and where a prompt goes on after that.
    full = np.arange(-(-mix.shortest // spec.page_size) * spec.page_size, mix.longest + 1, spec.page_size, dtype=np.int64)
    made = _made(spec, settings, np.unique(np.concatenate([[mix.shortest], full, full[full < mix.longest] + 1])))
    size: Counts = sum((spec[name].page_bytes(spec.page_size) * counts for name, counts in made.items()), np.zeros(1, dtype=np.int64))
    real = size > 0
    if not real.any():
        return None
    out = {}
    for name, counts in made.items():
        at = int(np.argmax(counts[real] / size[real]))
        out[name] = Fraction(int(counts[real][at]), int(size[real][at]))
    return out


def _made(spec: CacheSpec, settings: Settings, tokens: Counts) -> Mapping[str, Counts]:
    """Pages and snapshots that prompts of so many tokens leave behind: as :mod:`hicache_ray.compute` makes them, of all windows too."""
    whole = tokens // settings.grid * settings.grid if settings.exact else tokens
    out = {}
    for c in spec.components:
        top = tokens if c.role == "draft" else whole
        out[c.name] = _snapshots(_stride(c, spec, settings), settings, tokens) if c.is_state else top // (spec.page_size * c.page_span)
    return out


def _stride(c: Component, spec: CacheSpec, settings: Settings) -> int:
    """Tokens between the snapshots of a prompt; under ``exact`` all of them are on the grid."""
    return math.lcm(c.reach or settings.grid or spec.page_size, spec.step(None))


def _snapshots(stride: int, settings: Settings, tokens: Counts) -> Counts:
    count = tokens // stride
    if settings.state_snapshots is StateSnapshots.ALL:
        return count
    made = (range(stride, int(n) + 1, stride) for n in tokens)
    kept = (len(lengths.kept_snapshots(all_of, int(n), settings.state_snapshots)) for all_of, n in zip(made, tokens, strict=True))
    return np.fromiter(kept, dtype=np.int64, count=len(tokens))
