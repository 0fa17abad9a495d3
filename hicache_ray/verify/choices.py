"""Which cells of layout x io backend x write policy x tier run: every pair of choices at least once, or the whole product."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, get_args

from hicache_ray.config import settings
from hicache_ray.copies import SETTINGS, choose
from hicache_ray.errors import ConfigError
from hicache_ray.layout import ORDERS
from hicache_ray.verify.result import Cell

TIERS = ("device", "host", "storage", "other replica")
OPTIONS = {"layout": "--layout", "io_backend": "--io-backend", "write_policy": "--write-policy", "tier": "--tier"}


@dataclass(frozen=True)
class Choices:
    """The values of each axis that are to run, and those that this machine cannot run, with the reason."""

    axes: Mapping[str, Sequence[str]]
    not_run: Mapping[str, str]

    def product(self) -> list[Cell]:
        return [Cell(*values) for values in itertools.product(*self.axes.values())]

    def pairs(self) -> list[Cell]:
        """Few cells in which every pair of values of two axes occurs: greedily the one with the most new pairs."""
        cells = self.product()
        left = set(itertools.chain.from_iterable(map(_pairs, cells)))
        chosen: list[Cell] = []
        while left:
            best = max(cells, key=lambda cell: len(left.intersection(_pairs(cell))))
            chosen.append(best)
            left.difference_update(_pairs(best))
        return chosen


def _pairs(cell: Cell) -> Iterator[Any]:
    return itertools.combinations(enumerate(astuple(cell)), 2)


def legal(axis: str) -> tuple[str, ...]:
    """All values of an axis that the configuration knows, whether or not they can run here."""
    return {
        "layout": tuple(ORDERS),
        "io_backend": tuple(name for name in SETTINGS if name != "auto"),
        "write_policy": get_args(settings()["cache.write_policy"].annotation),
        "tier": TIERS,
    }[axis]


def choices(wanted: Mapping[str, Sequence[str]], device: str = "cpu") -> Choices:
    """All that can run on ``device``; an axis in ``wanted`` has only the values named there. Raises :class:`ConfigError` for a value that
    is none, or that was asked for by name and cannot run."""
    axes: dict[str, list[str]] = {}
    not_run: dict[str, str] = {}
    for axis in OPTIONS:
        asked = wanted.get(axis) or ()
        for value in asked:
            if value not in legal(axis):
                raise ConfigError(f'{OPTIONS[axis]} is "{value}"; choose one of {", ".join(legal(axis))}')
        axes[axis] = []
        for value in asked or legal(axis):
            why = _why_not(axis, value, device)
            if why and asked:
                raise ConfigError(why)
            if why:
                not_run[f"{axis} {value}"] = why
            else:
                axes[axis].append(value)
    return Choices(axes, not_run)


def _why_not(axis: str, value: str, device: str) -> str:
    if axis == "io_backend":
        try:
            choose(value, device, next(iter(ORDERS)), OPTIONS[axis])
        except ConfigError as error:
            return str(error)
    return ""
