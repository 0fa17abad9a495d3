"""Two checks by numbers: chunks against one chunk, and resumes from what decode has made."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from hicache_ray import compute, lengths
from hicache_ray.records import Outcome, Tokens
from hicache_ray.verify.bench import Bench, room
from hicache_ray.verify.replica import Answer, Interference, Replica, Setup
from hicache_ray.verify.restore import nothing, same_bytes
from hicache_ray.verify.result import Check, Verdict
from hicache_ray.verify.subject import Subject


def difference(a: Outcome | Answer, b: Outcome | Answer) -> float:
    """Largest difference of logprobs; infinite where other tokens were sampled."""
    if list(a.output) != list(b.output):
        return math.inf
    return max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True))


def _check(subject: Subject, name: str, note: str, problems: list[str]) -> Check:
    return Check(subject.name, name, Verdict.FAILED if problems else Verdict.PASSED, note, tuple(problems))


def chunked(subject: Subject) -> Check:
    """The same prompt in chunks of the grid and as one chunk: what a chunk has left must be read by the next one."""
    count = subject.sizes.prompt(subject.spec)
    bench = Bench(subject.loaded, room(subject.spec, subject.settings(), count, subject.sizes.new))
    tokens = subject.tokens(count, 2)
    outcomes = [bench.cold(tokens, subject.sizes.new, grid) for grid in (subject.sizes.grid, 0)]
    if error := next((o.error for o in outcomes if o.error), ""):
        return _check(subject, "chunked", "", [error])
    worst = difference(*outcomes)
    problems = []
    if not worst < subject.tolerance:
        problems.append(
            f"{_told(worst)} between chunks of {subject.sizes.grid} tokens and one chunk, which must agree within {subject.tolerance:g}; "
            "the model does not read all that it has cached"
        )
    return _check(subject, "chunked", f"logprobs within {worst:.1e}", problems)


def _told(worst: float) -> str:
    return "other tokens were sampled" if math.isinf(worst) else f"logprobs differ by {worst:.3g}"


def inexact(subject: Subject, interfere: Interference = nothing) -> Check:
    """``exact: false``: a prompt that ends between two snapshots, an answer that decodes past the next one, and a second turn from there."""
    track = math.lcm(subject.sizes.grid, subject.spec.step(None))
    first, new = track + track // 2 + 4, track - 3
    settings = subject.settings(exact=False, track=track)
    need = room(subject.spec, settings, first + new + track, subject.sizes.new)
    need = {name: max(n, room(subject.spec, settings, first, new)[name]) for name, n in need.items()}
    slots = {name: 2 * n + 1 for name, n in need.items()}
    setup = Setup(settings, "page_first", "auto", slots, subject.recipe(exact=False))
    with Replica(Bench(subject.loaded, slots), setup, subject.store) as replica:
        start = replica.put(subject.request("first", subject.tokens(first, 3), "inexact", new))
        made = replica.bench.lives["first"]
        replica.leave_device()
        replica.flush()
        grown = np.concatenate([made.tokens, subject.tokens(track // 4, 4)])
        request = subject.request("second", grown, "inexact")
        interfere(replica, request)
        got = replica.put(request)
        life = replica.bench.lives["second"]
        problems = list(same_bytes(life, made))
        problems += _resumed_in_decode(subject, life.start, _longest(subject, track, first, new, len(grown)), first)
        again = Bench(subject.loaded, room(subject.spec, settings, len(grown), subject.sizes.new)).cold(grown, subject.sizes.new, track)
    assert start.report is not None
    worst = difference(got, again)
    if not worst < subject.tolerance:
        problems.append(f"{_told(worst)} between the resume and a recompute, which must agree within {subject.tolerance:g}")
    subject.store.clear(60.0)
    return _check(subject, "inexact", f"resumed at {life.start}, decoded from {first} on; logprobs within {worst:.1e}", problems)


def _resumed_in_decode(subject: Subject, start: int, longest: int, prompt: int) -> Iterator[str]:
    if start != longest:
        yield f"resumed at {start} tokens; the largest legal length is {longest}"
    if start <= prompt:
        yield f"resumed at {start} tokens, which decode has not made: the prompt had {prompt}"


def _longest(subject: Subject, track: int, prompt: int, new: int, count: int) -> int:
    """The largest legal length of a prompt of ``count`` tokens, by the one rule, from all that the first turn has made."""
    spec, settings = subject.spec, subject.settings(exact=False, track=track)
    shape = compute.Shape.of(0, prompt, new)
    present = {}
    for c in spec.components:
        ends = range(spec.page_size * c.page_span, shape.end + 1, spec.page_size * c.page_span)
        made = compute.snapshot_lengths(c, settings, shape, spec) if c.is_state else ends
        present[c.name] = sum(1 << n // spec.page_size - 1 for n in made)
    allowed = lengths.within(count, spec.page_size, settings.step(spec))
    return lengths.longest(lengths.legal(spec.components, present, allowed, spec.page_size)) * spec.page_size


def cold_answer(bench: Bench, tokens: Tokens, new: int, grid: int) -> Answer:
    """A run without the tier, as an answer."""
    outcome = bench.cold(tokens, new, grid)
    return Answer(list(outcome.output), list(outcome.logprobs))
