"""What the evict-and-return probe found: data for tables and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """One request for R. ``bit_exact``: tokens and logprobs equal those of the cold run. ``digests_equal``: every page and snapshot that
    was restored has, on every rank, the digest that it had when it was made."""

    name: str
    ttft_s: float
    reused_device: int
    reused_host: int
    reused_storage: int
    computed: int
    bit_exact: bool
    digests_equal: bool
    replica: str = ""

    @property
    def reused(self) -> int:
        return self.reused_device + self.reused_host + self.reused_storage


@dataclass
class Result:
    """What the probe found. ``on_grid``: the prompt of exactly k*C tokens, which by the N-1 cap resumes one grid step earlier."""

    model: str
    tp: int
    write_policy: str
    layout: str
    page_size: int
    grid: int
    prompt_tokens: int
    steps: list[Step] = field(default_factory=list)
    on_grid: Step | None = None
    problems: list[str] = field(default_factory=list)

    def step(self, name: str) -> Step:
        return next(s for s in self.steps if s.name == name)

    def speedup(self, name: str) -> float:
        """How many times faster than cold a step's first token came."""
        return round(self.step("cold").ttft_s / self.step(name).ttft_s, 1)

    @property
    def passed(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        out = asdict(self)
        done = {s.name for s in self.steps}
        out |= {f"speedup_{n}": self.speedup(n) for n in ("return", "again", "storage", "other") if n in done}
        return out | {"passed": self.passed}
