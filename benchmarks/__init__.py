"""Benchmarks: ratios of two things measured in one run on one machine. ``python -m benchmarks`` runs them all.

A module ``benchmarks.bench_<name>`` has ``run() -> list[dict]``; see :class:`Row` for the keys of a row.
"""

from __future__ import annotations

from typing import TypedDict


class Row(TypedDict):
    """One number. ``ratio`` compares the value with the baseline as the ``goal`` counts it, e.g. ">= 0.8"; the error of one that failed."""

    name: str
    value: float | None
    unit: str
    baseline: float | None
    ratio: float | None
    goal: str
    met: bool
