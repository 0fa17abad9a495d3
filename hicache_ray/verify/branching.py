"""Branching conversations: groups of branches that share a prefix, diverge, and grow by turns, on a device that holds one of them.

They are submitted in a random order and executed in a random interleaving; one seed is one history. Every answer must be, to the bit, that
of a run of its prompt alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hicache_ray.errors import HiCacheError
from hicache_ray.records import Tokens
from hicache_ray.story import Request
from hicache_ray.verify.bench import Bench, room
from hicache_ray.verify.numbers import cold_answer
from hicache_ray.verify.replica import Answer, Replica, Setup
from hicache_ray.verify.restore import same_answer
from hicache_ray.verify.result import Check, Verdict
from hicache_ray.verify.subject import Subject

GROUPS, BRANCHES, TURNS, PREFIX = 3, 3, 2, 512
#: Requests under way at once, at most; one in so many steps submits another.
AT_ONCE, PACE = 4, 6
#: Fewer lengths and tiers would show that the run proved little.
LEAST_LENGTHS, LEAST_TIERS = 3, 2


@dataclass
class Branch:
    """One conversation. ``prompts``: of its turns so far."""

    name: str
    tokens: Tokens
    turn: int = 0
    prompts: dict[str, Tokens] = field(default_factory=dict)


class Branching:
    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.rng = np.random.default_rng([subject.seed, 5])
        grid = subject.sizes.grid
        self.shared = 3 * grid  # tokens beyond the prefix that branches may share, at most
        self.grown = (max(1, grid // 4), 2 * grid)  # tokens by which a turn grows
        longest = PREFIX + self.shared + TURNS * (self.grown[1] + subject.sizes.new)
        self.need = room(subject.spec, subject.settings(), longest, subject.sizes.new)
        self.lengths: Counter[int] = Counter()
        self.tiers: Counter[str] = Counter()

    def run(self) -> Check:
        """Both halves: the conversations through the tier, then each prompt alone."""
        subject = self.subject
        device = {name: n + max(1, n // 8) for name, n in self.need.items()}
        host = {name: max(1, n * 7 // 8) for name, n in self.need.items()}
        setup = Setup(subject.settings("write_back"), "page_head", "auto", host, subject.recipe())
        with Replica(Bench(subject.loaded, device), setup, subject.store) as replica:
            branches = list(self._branches())
            answers = self._converse(replica, branches)
            problems = list(self._bytes(replica))
        reference = Bench(subject.loaded, self.need)
        for branch in branches:
            for rid, prompt in branch.prompts.items():
                want = cold_answer(reference, prompt, subject.sizes.new, subject.sizes.grid)
                problems += [f"request {rid} of {len(prompt)} tokens: {p}" for p in same_answer(answers[rid], want, "its cold run")]
        problems += self._proved()
        subject.store.clear(60.0)
        note = f"{len(answers)} requests, hits of {len(self.lengths)} lengths: " + ", ".join(
            f"{t} {n:,}" for t, n in sorted(self.tiers.items())
        )
        return Check(subject.name, "branching", Verdict.FAILED if problems else Verdict.PASSED, note + " tokens", tuple(problems))

    def _branches(self) -> Iterator[Branch]:
        """All branches of a group share its prefix, and then more or less of what follows it."""
        for group in range(GROUPS):
            trunk = self.subject.tokens(PREFIX + self.shared, 6, group)
            for branch in range(BRANCHES):
                diverge = PREFIX + self._chance(self.shared + 1)
                yield Branch(f"{group}.{branch}", np.concatenate([trunk[:diverge], self._growth()]))

    def _growth(self) -> Tokens:
        return self.subject.tokens(int(self.rng.integers(*self.grown, endpoint=True)), 7, int(self.rng.integers(1 << 31)))

    def _chance(self, count: int) -> int:
        return int(self.rng.integers(count))

    def _converse(self, replica: Replica, branches: list[Branch]) -> dict[str, Answer]:
        """Until all turns are over. Between two steps of the group another branch may begin its next turn."""
        due, running = list(branches), dict[str, tuple[Branch, Answer]]()
        answers: dict[str, Answer] = {}
        while due or running:
            if due and len(running) < AT_ONCE and (not running or self._chance(PACE) == 0):
                branch = due.pop(self._chance(len(due)))
                request = self._next(branch)
                running[request.rid] = branch, replica.begin(request)
            elif not replica.step(self._chance):
                raise HiCacheError(f"requests {', '.join(running)} wait for something that nothing under way will bring")
            for rid in [rid for rid, (_, answer) in running.items() if answer.ended]:
                branch, answer = running.pop(rid)
                if answer.error is not None:
                    raise answer.error
                answers[rid] = answer
                self._count(answer)
                branch.turn += 1
                if branch.turn < TURNS:
                    branch.tokens = np.concatenate([branch.tokens, np.asarray(answer.output, dtype=np.int32), self._growth()])
                    due.append(branch)
        replica.settle(self._chance)
        return answers

    def _next(self, branch: Branch) -> Request:
        rid = f"{branch.name}, turn {branch.turn + 1}"
        branch.prompts[rid] = branch.tokens
        return self.subject.request(rid, branch.tokens, "branching")

    def _count(self, answer: Answer) -> None:
        report = answer.report
        assert report is not None
        reused = {"device": report.device, "host": report.host, "storage": report.storage}
        self.tiers.update({tier: n for tier, n in reused.items() if n})
        self.lengths.update([sum(reused.values())] if any(reused.values()) else [])

    def _bytes(self, replica: Replica) -> Iterator[str]:
        """Canonical bytes: whoever computes a page makes the same, and whoever reads it reads those."""
        grid, page = self.subject.sizes.grid, self.subject.sizes.page
        made: dict[tuple[str, bytes], set[str]] = defaultdict(set)
        lives = replica.bench.lives
        for life in lives.values():
            keys, canonical = life.keys(), life.prompt // grid * grid // page
            for (component, index), digest in life.made.items():
                if index < canonical:
                    made[component, keys[index]].add(digest)
        for (component, _), digests in made.items():
            if len(digests) > 1:
                yield f"component {component!r}: two requests computed one page, and its bytes differ"
        for rid, life in lives.items():
            keys = life.keys()
            wrong = [spot for spot, digest in life.read.items() if digest not in made[spot[0], keys[spot[1]]]]
            for component, index in wrong[:1]:
                yield f"request {rid}: component {component!r}, page {index}: the restored bytes are not those that were made"

    def _proved(self) -> Iterator[str]:
        if len(self.lengths) < LEAST_LENGTHS or len(self.tiers) < LEAST_TIERS:
            yield (
                f"the hits were of {len(self.lengths)} lengths from {len(self.tiers)} tiers, which proves little: there should be at least "
                f"{LEAST_LENGTHS} and {LEAST_TIERS}; choose another --seed"
            )
