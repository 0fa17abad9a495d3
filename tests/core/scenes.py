"""Scenes: a stack made ready, and one request whose story has every kind of step in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hicache_ray.records import Record
from hicache_ray.story import Phase
from hicache_ray.testing import Stack, full, state, window
from tests.core.drive import Steps, all_bytes_are_right, at_rest, prompt

A, C, D = prompt(1, 640), prompt(2, 500), prompt(3, 200)
B = A + prompt(4, 200)
DECODED = 70


def hybrid(**more: object) -> Stack:
    pools = {"full": full(), "swa": window(80), "state": state(128)}
    return Stack(**{"pools": pools, "ranks": 2, **more})  # type: ignore[arg-type]


def _stored() -> Stack:
    """The beginning of the prompt is in L3 and nowhere else."""
    stack = hybrid()
    stack.put(A)
    stack.settle()
    stack.flush()
    return stack


def _crowded() -> Stack:
    """Write-back with the device full of what only the device has; the beginning of the prompt is there too."""
    stack = hybrid(write_policy="write_back", l1=18)
    stack.put(A)
    stack.put(C)
    stack.settle()
    return stack


def _begin(stack: Stack) -> None:
    stack.begin(B, "r", decoded=DECODED)


def _begin_with_digests(stack: Stack) -> None:
    stack._jobs["r"] = stack.group.submit(replace(stack._request(B, "r", DECODED, {}, None), digests=True))
    stack._collect()


def _prefetch(stack: Stack) -> None:
    stack.prefetch("r", B)


def go_on(stack: Stack) -> None:
    """A held prefetch goes on with its load."""
    stack.group.proceed("r")
    stack._collect()


@dataclass(frozen=True)
class Scene:
    """``ready`` and ``begin``; the request under way is called ``r``. ``prompts``: of all bytes that may be cached."""

    name: str
    ready: Callable[[], Stack]
    begin: Callable[[Stack], None]
    prompts: Sequence[Sequence[int]] = (A, B, C)

    def play(self, steps: Steps, count: int | None = None) -> int:
        """Up to ``count`` envelopes of the request; a prefetch that is held goes on. Returns how many were run."""
        done = steps.run(count)
        job = steps.stack._jobs["r"]
        if self.begin is _prefetch and job.phase in (Phase.READY, Phase.DECLINED) and (count is None or done < count):
            go_on(steps.stack)
            done += steps.run(None if count is None else count - done)
        return done

    def started(self) -> Steps:
        steps = Steps(self.ready())
        steps.stack.events.clear()
        self.begin(steps.stack)
        return steps

    def records(self) -> list[Record]:
        """The records of the undisturbed story, in order."""
        steps = self.started()
        self.play(steps)
        return list({e.record.id: e.record for e in steps.seen}.values())


FETCH = Scene("from storage", _stored, _begin)
CROWDED = Scene("a crowded device", _crowded, _begin)
DIGESTS = Scene("with digests", _stored, _begin_with_digests)
PREFETCH = Scene("prefetch and load", _stored, _prefetch)
SCENES = (FETCH, CROWDED, DIGESTS, PREFETCH)


def all_is_well_and_the_next_request_too(scene: Scene, stack: Stack) -> None:
    """After whatever has happened: nothing leaks, no byte is wrong, and the same request runs to its end with right bytes."""
    at_rest(stack)
    all_bytes_are_right(stack, scene.prompts)
    stack.put(B, "again", decoded=DECODED)
    stack.settle()
    at_rest(stack)
    assert all_bytes_are_right(stack, scene.prompts) > 0
    assert stack.probe(B).l1 == 768  # the last multiple of the snapshots' 128 below 840
    for pool in stack.pools:
        for rank in range(stack.ranks):
            assert stack.read(B, pool, rank) == stack.made(B, pool, rank) != b""
