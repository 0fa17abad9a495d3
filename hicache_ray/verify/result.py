"""What verify found: data for the table and for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Verdict(str, Enum):
    """Of one check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


#: The checks, in the order in which they run. Only ``restore`` has cells.
CHECKS: Mapping[str, str] = {
    "restore": "a prompt that comes back from a tier: tokens, logprobs, digests of pages and states, and how much was reused",
    "chunked": "chunks of the grid against one chunk: a model that ignores its cache fails this",
    "branching": "branching conversations on a device too small for them, in a random order: every answer against its own cold run",
    "inexact": "exact: false, with pages and states that decode has made: their digests, and logprobs against a recompute",
}


@dataclass(frozen=True)
class Cell:
    """One choice of everything that a restore may depend on. ``other replica`` is a tier here: storage, written by somebody else."""

    layout: str
    io_backend: str
    write_policy: str
    tier: str


@dataclass(frozen=True)
class Check:
    """One check of one model. ``problems``: sentences, empty unless it failed. ``note``: what it showed, or why it was not run."""

    model: str
    name: str
    verdict: Verdict
    note: str = ""
    problems: tuple[str, ...] = ()
    cell: Cell | None = None


@dataclass
class Result:
    """All checks of a run. ``not_run``: choices that this machine cannot make, with the reason; none of them has a check. ``left_out``:
    cells that could run and did not, because every pair of their choices occurs in another."""

    page_size: int
    grid: int
    dtype: str
    checks: list[Check] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    left_out: list[Cell] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(c.model for c in self.checks))

    def of(self, model: str, name: str) -> Sequence[Check]:
        return [c for c in self.checks if (c.model, c.name) == (model, name)]

    def counts(self, model: str, name: str) -> Mapping[Verdict, int]:
        return Counter(c.verdict for c in self.of(model, name))

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Those that ran."""
        return tuple(dict.fromkeys(c.cell for c in self.checks if c.cell is not None))

    @property
    def problems(self) -> tuple[str, ...]:
        """Every problem, with the check it belongs to."""
        return tuple(f"{c.model}, {c.name}{_at(c.cell)}: {problem}" for c in self.checks for problem in c.problems)

    @property
    def passed(self) -> bool:
        return any(c.verdict is Verdict.PASSED for c in self.checks) and all(c.verdict is not Verdict.FAILED for c in self.checks)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed, "problems": list(self.problems)}


def _at(cell: Cell | None) -> str:
    return "" if cell is None else f" ({cell.layout}, {cell.io_backend}, {cell.write_policy}, {cell.tier})"
