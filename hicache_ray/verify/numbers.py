"""Two checks by numbers: chunks against one chunk, and resumes from what decode has made."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from hicache_ray import compute, lengths
from hicache_ray.families import family_of
from hicache_ray.records import Outcome, Tokens
from hicache_ray.verify.bench import Bench, room
from hicache_ray.verify.replica import Answer, Interference, Replica, Setup
from hicache_ray.verify.restore import nothing, same_answer, same_bytes
from hicache_ray.verify.result import Check, Verdict
from hicache_ray.verify.subject import TOLERANCE, Subject


def difference(a: Outcome | Answer, b: Outcome | Answer) -> float:
    """Largest difference of logprobs; infinite where other tokens were sampled."""
    if list(a.output) != list(b.output):
        return math.inf
    return max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True))


def cold_answer(bench: Bench, tokens: Tokens, new: int, grid: int) -> Answer:
    """A run without the tier, as an answer."""
    outcome = bench.cold(tokens, new, grid)
    return Answer(list(outcome.output), list(outcome.logprobs))


def _check(subject: Subject, name: str, note: str, problems: list[str]) -> Check:
    return Check(subject.name, name, Verdict.FAILED if problems else Verdict.PASSED, note, tuple(problems))


def chunked(subject: Subject) -> Check:
    """The same prompt in chunks of the grid and as one chunk: what a chunk has left must be read by the next one."""
    if subject.sizes.dtype != "float32":  # several tiny models that ignore their states hide in its rounding
        return Check(subject.name, "chunked", Verdict.NOT_RUN, f"{subject.sizes.dtype} rounds too much to judge; use --dtype float32")
    count = subject.sizes.prompt(subject.spec)
    bench = Bench(subject.loaded, room(subject.spec, subject.settings(), count, subject.sizes.new))
    tokens = subject.tokens(count, 2)
    outcomes = [bench.cold(tokens, subject.sizes.new, grid) for grid in (subject.sizes.grid, 0)]
    if error := next((o.error for o in outcomes if o.error), ""):
        return _check(subject, "chunked", "", [error])
    worst = difference(*outcomes)
    problems = []
    if not worst < TOLERANCE:
        problems.append(
            f"{_told(worst)} between chunks of {subject.sizes.grid} tokens and one chunk, which must agree within {TOLERANCE:g}; "
            "the model does not read all that it has cached"
        )
    return _check(subject, "chunked", f"logprobs within {worst:.1e}", problems)


def _told(worst: float) -> str:
    return "other tokens were sampled" if math.isinf(worst) else f"logprobs differ by {worst:.3g}"


def inexact(subject: Subject, interfere: Interference = nothing) -> Check:
    """``exact: false``: a prompt that ends between two snapshots, an answer that decodes past the next one, a second turn from there.

    The resume must equal the same run without the tier, which stops decoding there and goes on, and be close to a recompute.
    """
    track = math.lcm(subject.sizes.grid, subject.spec.step(None))
    first, new, more = track + track // 2 + 4, track - 3, track // 4
    settings = subject.settings(exact=False, track=track)
    whole = room(subject.spec, settings, first + new + more, subject.sizes.new)
    slots = {name: 2 * max(n, whole[name]) + 1 for name, n in room(subject.spec, settings, first, new).items()}
    setup = Setup(settings, "page_first", "auto", slots, subject.recipe())
    with Replica(Bench(subject.loaded, slots), setup, subject.store) as replica:
        replica.put(subject.request("first", subject.tokens(first, 3), "inexact", new))
        made = replica.bench.lives["first"]
        replica.leave_device()
        replica.flush()
        grown = np.concatenate([made.tokens, subject.tokens(more, 4)])
        request = subject.request("second", grown, "inexact")
        interfere(replica, request)
        got = replica.put(request)
        life = replica.bench.lives["second"]
    subject.store.clear(60.0)
    problems = list(same_bytes(life, made))
    problems += _resumed_in_decode(life.start, _longest(subject, track, first, new, len(grown)), first)
    alone, grid = Bench(subject.loaded, whole), subject.sizes.grid
    own = alone.stop_and_go(grown, first, max(life.start, first), subject.sizes.new, grid)
    problems += same_answer(got, Answer(list(own.output), list(own.logprobs)), "the same run without the tier")
    worst = difference(got, alone.cold(grown, subject.sizes.new, grid))
    near = "other tokens sampled than by" if math.isinf(worst) else f"logprobs within {worst:.1e} of"
    note = f"resumed at {life.start}, decoded from {first} on; {near} a recompute"
    if why := _not_judged(subject):
        return _check(subject, "inexact", f"{note}, as without the tier: {why}", problems)
    if not worst < TOLERANCE:
        problems.append(
            f"{_told(worst)} between the resume and a recompute, which must agree within {TOLERANCE:g}; where the same run without "
            "the tier is no closer, decode and prefill of the model differ"
        )
    return _check(subject, "inexact", note, problems)


def _not_judged(subject: Subject) -> str:
    """Why tokens that were decoded need not be close to the same tokens in a prompt; empty where they must."""
    if subject.sizes.dtype != "float32":
        return f"{subject.sizes.dtype} rounds too much to judge"
    return family_of(subject.spec.model_type).decode


def _resumed_in_decode(start: int, longest: int, prompt: int) -> Iterator[str]:
    if start != longest:
        yield f"resumed at {start} tokens; the largest legal length is {longest}"
    if start <= prompt:
        yield f"resumed at {start} tokens, which decode has not made: the prompt had {prompt}"


def _longest(subject: Subject, track: int, prompt: int, new: int, count: int) -> int:
    """The largest legal length of a prompt of ``count`` tokens, by the one rule, from all that the first turn has made."""
    spec, settings = subject.spec, subject.settings(exact=False, track=track)
    shape = compute.Shape.cold(prompt, new)
    present = {}
    for c in spec.components:
        ends = range(spec.page_size * c.page_span, shape.end + 1, spec.page_size * c.page_span)
        made = compute.snapshot_lengths(c, settings, shape, spec) if c.is_state else ends
        present[c.name] = sum(1 << n // spec.page_size - 1 for n in made)
    allowed = lengths.within(count, spec.page_size, settings.step(spec))
    return lengths.longest(lengths.legal(spec.components, present, allowed, spec.page_size)) * spec.page_size
