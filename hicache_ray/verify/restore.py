"""The cells: a prompt is computed, taken away from the tiers above, and comes back. All cells of a model share one cold run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hicache_ray import lengths
from hicache_ray.errors import LayoutBroken
from hicache_ray.layout import ORDERS
from hicache_ray.story import Request
from hicache_ray.verify.bench import Bench, Life, room
from hicache_ray.verify.replica import Answer, Interference, Replica, Setup
from hicache_ray.verify.result import Cell, Check, Verdict
from hicache_ray.verify.subject import Subject

#: How many digests that differ are told.
TOLD = 3


def nothing(replica: Replica, request: Request) -> None:
    """No interference."""


def same_answer(got: Answer, want: Answer, what: str = "the cold run") -> Iterator[str]:
    """Sentences where the answers differ at all."""
    if got.output != want.output:
        yield f"sampled tokens {got.output}, {what} {want.output}"
    worst = max((abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=False)), default=0.0)
    if got.logprobs != want.logprobs:
        yield f"logprobs differ from those of {what} by up to {worst:.3g}; they must be equal"


def same_bytes(life: Life, made: Life) -> Iterator[str]:
    """Sentences where what a resume has read is not what was made. States before pages: they are fewer."""
    wrong = [spot for spot, digest in life.read.items() if made.made.get(spot) != digest]
    for component, index in wrong[:TOLD]:
        yield f"component {component!r}, page {index}: the restored bytes are not those that were made"
    if len(wrong) > TOLD:
        yield f"{len(wrong) - TOLD} more pages or states differ"


@dataclass
class Restore:
    """The cells of one model. ``interfere`` comes between production and restore."""

    subject: Subject
    interfere: Interference = nothing

    def __post_init__(self) -> None:
        subject = self.subject
        self.count = subject.sizes.prompt(subject.spec)
        need = room(subject.spec, subject.settings(), self.count, subject.sizes.new)
        self.slots = {name: 2 * n + 1 for name, n in need.items()}
        self.benches = Bench(subject.loaded, self.slots), Bench(subject.loaded, self.slots)
        self.benches[0].remember()
        self.first: Answer | None = None

    def run(self, cells: Sequence[Cell]) -> Iterator[Check]:
        for number, cell in enumerate(cells):
            problems = tuple(self._cell(cell, str(number)))
            verdict = Verdict.FAILED if problems else Verdict.PASSED
            yield Check(self.subject.name, "restore", verdict, f"{self.hit} of {self.count} tokens reused", problems, cell)
            self.subject.store.clear(60.0)

    def _replica(self, cell: Cell, reader: bool = False) -> Replica:
        subject = self.subject
        setup = Setup(subject.settings(cell.write_policy), cell.layout, cell.io_backend, self.slots, subject.recipe())
        if reader:  # another replica may have another layout
            others = tuple(ORDERS)
            setup = replace(setup, layout=others[(others.index(cell.layout) + 1) % len(others)])
        return Replica(self.benches[int(reader)], setup, subject.store)

    def _cell(self, cell: Cell, world: str) -> Iterator[str]:
        request = self.subject.request("R", self.subject.tokens(self.count, 1), world)
        with self._replica(cell) as writer:
            yield from _tested(writer)
            cold = writer.put(request)
            made = writer.bench.lives["R"]
            assert cold.report is not None
            if cold.report.computed != self.count:
                yield f"the cold run computed {cold.report.computed} of {self.count} tokens"
            if self.first is None:
                self.first = cold
            yield from same_answer(cold, self.first, "the first cold run")
            if cell.tier != "device":
                writer.leave_device()
            if cell.tier == "storage":
                writer.flush()
            if cell.tier != "other replica":
                yield from self._again(writer, request, made, cell)
                return
        with self._replica(cell, reader=True) as reader:
            yield from _tested(reader)
            yield from self._again(reader, request, made, cell)

    @property
    def hit(self) -> int:
        """The largest legal length: all that was made is in the tier."""
        spec = self.subject.spec
        allowed = lengths.within(self.count, spec.page_size, self.subject.settings().step(spec))
        return lengths.longest(allowed) * spec.page_size

    def _again(self, replica: Replica, request: Request, made: Life, cell: Cell) -> Iterator[str]:
        assert self.first is not None
        self.interfere(replica, request)
        got = replica.put(request)
        life, report = replica.bench.lives[request.rid], got.report
        assert report is not None
        tier = {"other replica": "storage"}.get(cell.tier, cell.tier)
        have = {"device": report.device, "host": report.host, "storage": report.storage, "computed": report.computed}
        want = {**dict.fromkeys(have, 0), tier: self.hit, "computed": self.count - self.hit}
        if have != want:
            yield f"{_counts(have)}; it should be {_counts(want)} ({report.limit.value})"
        yield from same_bytes(life, made)
        # What is computed after the resume is canonical as well, up to the last whole chunk.
        canonical = self.count // self.subject.sizes.grid * self.subject.sizes.grid
        for (component, index), digest in life.made.items():
            if (index + 1) * self.subject.sizes.page <= canonical and made.made.get((component, index)) != digest:
                yield f"component {component!r}, page {index}: computed anew after the resume, its bytes are others"
        yield from same_answer(got, self.first)


def _tested(replica: Replica) -> Iterator[str]:
    """A mix-up on the way is named by its axis here; what follows could tell only that bytes differ."""
    try:
        replica.self_test()
    except LayoutBroken as error:
        yield str(error)


def _counts(tokens: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in tokens.items() if n)
