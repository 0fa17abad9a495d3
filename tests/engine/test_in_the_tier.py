"""Models of every kind of component behind the real core: match, plan, load, compute, insert, backup, eviction and L3 in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hicache_ray.copies import Mover, choose
from hicache_ray.copies_fake import FakeDevice, FakeEvent
from hicache_ray.copies_queues import Queue
from hicache_ray.executor import Executor
from hicache_ray.integrations.transformers import Engine, Loaded
from hicache_ray.testing import Served, Stack
from hicache_ray.testing_queues import fake_mover
from tests.engine.rig import GRID, PAGE, load, plain, prompt
from tests.queues import slow

pytestmark = pytest.mark.model
#: A family for every kind of component: full; window; chunked; latent, rope key and indexer keys; keys, values and states in one layer;
#: several conv states; entries at two ratios, one wider than a page, and tails.
KINDS = ("llama", "mistral", "llama4", "deepseek_v32", "falcon_h1", "inkling", "deepseek_v4")
COUNT, HIT = 4 * GRID + 45, 4 * GRID


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class LateCopies(FakeDevice):
    """A device whose engine is this very thread: a page is not there before something waits for it."""

    def wait(self, queue: Queue, event: FakeEvent) -> None:
        if queue is Queue.COMPUTE:
            assert self.join(event, 1.0)
        else:
            super().wait(queue, event)


def tier(loaded: Loaded, device: FakeDevice | None = None, **more: object) -> Stack:
    """The kit's stack with the model in the place of its stand-in."""
    stack = Stack(PAGE, {c.name: c for c in loaded.spec.components}, l1=96, l2=96, exact=True, grid=GRID, **more)  # type: ignore[arg-type]
    mover = fake_mover(device) if device is not None else Mover(choose("auto", "cpu", stack.layout), threads=1)
    engine = Engine(loaded.model, stack.spec, stack._engines[0].pools, mover.by_layer())
    stack.devices = (device,) if device is not None else ()
    stack._executors[0] = Executor(stack._executors[0]._rank, mover, stack.store, engine.run, stack.clock)
    return stack


def ask(stack: Stack, tokens: list[int], new: int = 4) -> tuple[Served, list[int]]:
    served = stack.put([*tokens, *([0] * (new - 1))], "request", decoded=new - 1)
    stack.settle()
    stack.audit()
    return served, stack.outputs["request"]


@pytest.mark.parametrize("family", KINDS)
def test_a_hit_from_every_tier_gives_the_cold_answer(family: str, tmp_path: Path) -> None:
    loaded = load(family, tmp_path)
    stack, tokens = tier(loaded), prompt(COUNT).tolist()
    want = list(plain(loaded.model, prompt(COUNT), 4).output)
    assert ask(stack, tokens) == (Served(0, 0, 0, COUNT), want)
    for spoiled in ("l1", "l2"):
        assert stack.probe(tokens).l1 == stack.probe(tokens).l2 == stack.probe(tokens).l3 == HIT
        stack.flush(l1=True, l2=spoiled == "l2")
        for pool in stack._engines[0].pools.values():
            pool.buffer.fill_(255)
        assert stack.probe(tokens).l1 == 0
        served, got = ask(stack, tokens)
        assert got == want
        assert served == (Served(0, HIT, 0, 45) if spoiled == "l1" else Served(0, 0, HIT, 45))
    # From the device; and a longer prompt that goes on from there.
    assert ask(stack, tokens) == (Served(HIT, 0, 0, 45), want)
    longer = prompt(6 * GRID + 1)
    served, got = ask(stack, longer.tolist())
    assert (served.computed, got) == (6 * GRID + 1 - HIT, list(plain(loaded.model, longer, 4).output))


@pytest.mark.parametrize("family", KINDS)
def test_every_layer_waits_for_its_own_pages(family: str, tmp_path: Path) -> None:
    """On a device where a load is under way when the model begins: what no layer asked for would be read as garbage."""
    device = LateCopies(slow(Queue.COPY))
    loaded = load(family, tmp_path)
    stack, tokens = tier(loaded, device), prompt(COUNT).tolist()
    _, want = ask(stack, tokens)
    stack.flush(l1=True, l2=False)
    for pool in stack._engines[0].pools.values():
        pool.buffer.fill_(255)
    device.log.clear()
    device.joins.clear()
    stack.put([*tokens, 0, 0, 0], "request", decoded=3)
    assert stack.outputs["request"] == want == list(plain(loaded.model, prompt(COUNT), 4).output)
    # Layer after layer was waited for, each once: the states together, then every layer of the model that has pages.
    layers = {n for c in loaded.spec.components if not c.is_state for n in c.layers}
    states = any(c.is_state for c in loaded.spec.components)
    assert len(device.joins) <= len(layers) + states
    if family != "llama4":  # it resumes at the end of a chunk, where chunked layers need nothing
        assert len(device.joins) == len(layers) + states
    stack.settle()
    stack.audit()


def test_a_layer_that_does_not_ask_reads_garbage(tmp_path: Path) -> None:
    device = LateCopies(slow(Queue.COPY))
    loaded = load("llama", tmp_path)
    stack, tokens = tier(loaded, device), prompt(COUNT).tolist()
    _, want = ask(stack, tokens)
    engine = stack._executors[0]._engine.__self__  # type: ignore[attr-defined]
    for rows in engine.cache.layers[-1].rows.values():
        rows._arrived = None
    stack.flush(l1=True, l2=False)
    for pool in stack._engines[0].pools.values():
        pool.buffer.fill_(255)
    stack.put([*tokens, 0, 0, 0], "request", decoded=3)
    assert stack.outputs["request"] != want


def test_a_resume_is_a_multiple_of_the_largest_ratio_and_the_grid(tmp_path: Path) -> None:
    """Ratio 128 on a grid of 64 and pages of 16: pages of 8 base pages, lengths in steps of 128, and no snapshot in between."""
    loaded = load("deepseek_v4", tmp_path, compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128})
    assert (loaded.spec["hca"].page_span, loaded.spec["hca"].entries(PAGE), loaded.spec.step(GRID)) == (8, 1, 128)
    stack, tokens = tier(loaded), prompt(3 * GRID + 45).tolist()
    want = list(plain(loaded.model, prompt(3 * GRID + 45), 4).output)
    assert ask(stack, tokens) == (Served(0, 0, 0, 237), want)
    assert stack.have("l1", "csa_tail", tokens) == stack.have("l1", "hca_tail", tokens) == {128}
    stack.flush(l1=True, l2=True)
    assert ask(stack, tokens) == (Served(0, 0, 128, 109), want)
