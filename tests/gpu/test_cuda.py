"""All that needs a real GPU, in one script: ``python tests/gpu/test_cuda.py`` (a few minutes at most), or pytest as usual.

Copies of every kind of field between all layouts by copy engines (in batches, and in planes) and by the kernel; the fences, each with its
negative control; no synchronise on the request path; layers that compute while later ones copy; models whose restored run equals their
cold one. Where there is no GPU it says so and has shown nothing.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import pytest
import torch

from hicache_ray.copies import BACKENDS, Copier, Mover
from hicache_ray.copies_cuda import no_direct, no_kernel
from hicache_ray.copies_queues import Order
from hicache_ray.errors import ConfigError
from hicache_ray.executor import Executor, Rank
from hicache_ray.integrations.transformers import Engine
from hicache_ray.layout import ORDERS
from hicache_ray.pool import Pool
from hicache_ray.records import Compute, Digest, Move, Outcome, Span, slots_array
from hicache_ray.spec import CacheSpec, Component, Field, Kind, Tier
from hicache_ray.storage.memory import MemoryStore
from hicache_ray.store import KEY_BYTES
from tests.engine.rig import GRID, load, prompt
from tests.engine.rig import PAGE as MODEL_PAGE
from tests.layout_twin import kv, state

MISSING = no_direct()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(MISSING), reason=f"nothing about CUDA is shown by this run: {MISSING}"),
]
DEVICE = "cuda:0"
PAGE, SLOTS, LAYERS = 8, 8, 4
#: Long enough (some 20 ms and more) that whatever does not wait is done first.
CYCLES = 50_000_000
ROUNDS = 200
KINDS = {
    "kv": kv(2, 64, 64, layers=LAYERS),
    "unlike": kv(2, 5, 3, layers=LAYERS),
    "fp8 and scales": Component("full", Kind.FULL, (Field("s", 2, 1, 4, "float32"), Field("k", 2, 16, 1, "float8_e4m3fn")), (0, 1, 2)),
    "4 bit and scales": Component("full", Kind.FULL, (Field("k", 2, 7, 1, "uint8"), Field("s", 2, 1, 2)), (0, 1, 2)),
    "entries": Component("full", Kind.FULL, (Field("entry", 1, 6),), (0, 2), ratio=2, page_span=2),
    "state": state(),
}


def open_mover(name: str) -> Mover:
    """``direct`` (batches where this CUDA has them), ``planes`` (direct without batches) or ``kernel``."""
    if name == "kernel" and (lacks := no_kernel()):
        pytest.skip(f"the kernel is not shown by this run: {lacks}")
    wanted = "kernel" if name == "kernel" else "direct"
    row = next(row for row in BACKENDS if (row.device, row.name) == ("cuda", wanted))
    mover = Mover(row, threads=4, device=DEVICE)
    if name == "planes":
        mover.order.device.batched = False  # type: ignore[union-attr]
    return mover


@pytest.fixture(params=["direct", "planes", "kernel"])
def mover(request: pytest.FixtureRequest) -> Iterator[Mover]:
    with open_mover(request.param) as opened:
        yield opened


@pytest.fixture(params=[True, False], ids=["fenced", "without fences"])
def fenced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(Order, "_hold", lambda *_: None)
    return bool(request.param)


@dataclass
class Rig:
    """One rank with one component; ``engine`` enqueues what a compute record does."""

    mover: Mover
    component: Component
    layouts: tuple[str, str] = ("layer_first", "page_first")
    engine: Callable[[Compute], Outcome] = lambda _: Outcome()
    store: MemoryStore = field(default_factory=lambda: MemoryStore(1 << 24))

    def __post_init__(self) -> None:
        spec = CacheSpec("test", PAGE, (self.component,))
        self.name, size = self.component.name, SLOTS * self.component.page_bytes(PAGE)
        tiers = zip((Tier.DEVICE, Tier.HOST), self.layouts, strict=True)
        self.pools = {t: Pool(self.component, PAGE, SLOTS, layout, self.mover.buffer(t, size)) for t, layout in tiers}
        rank = Rank(0, spec, {t: {self.name: pool} for t, pool in self.pools.items()}, {self.name: b"t" * 16})
        self.executor = Executor(rank, self.mover, self.store, lambda record: self.engine(record), time.monotonic)

    @property
    def order(self) -> Order:
        assert self.mover.order is not None
        return self.mover.order

    def move(self, source: Tier, target: Tier, of: list[int], to: list[int], keys: tuple[bytes, ...] = ()) -> None:
        outcome = self.executor.execute(Move(0, "r", source, target, (Span(self.name, slots_array(of), slots_array(to), keys),)))
        assert outcome == Outcome(bits=((1 << max(len(of), len(to))) - 1,))

    def compute(self, *slots: int, start: int = 0) -> None:
        record = Compute(0, "r", start, np.zeros(len(slots) * PAGE - start, dtype=np.int32), 1, 0, {self.name: slots_array(slots)})
        assert self.executor.execute(record) == Outcome()

    def rows(self, tier: Tier) -> dict[str, torch.Tensor]:
        return {f.name: self.pools[tier].rows(f.name) for f in self.component.fields}

    def random(self, seed: int, slots: int = SLOTS) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(seed)
        shapes = {name: (slots, *rows.shape[1:]) for name, rows in self.rows(Tier.HOST).items()}
        return {name: torch.randint(0, 256, shape, dtype=torch.uint8, generator=made) for name, shape in shapes.items()}

    def settle(self) -> None:
        self.order.drain()


# -- bytes ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_field_between_all_layouts(kind: str, mover: Mover) -> None:
    for seed, layouts in enumerate(itertools.product(ORDERS, ORDERS)):
        rig = Rig(mover, KINDS[kind], layouts)
        made, host = rig.random(seed), rig.random(seed + 1000)
        for name, values in made.items():
            rig.rows(Tier.DEVICE)[name].copy_(values)
            rig.rows(Tier.HOST)[name].copy_(host[name])
        torch.cuda.synchronize()
        keys = (b"a" * KEY_BYTES, b"b" * (KEY_BYTES - 1) + bytes([seed]))
        rig.move(Tier.DEVICE, Tier.HOST, [5, 1], [2, 6])
        rig.move(Tier.HOST, Tier.STORAGE, [2, 6], [], keys)
        rig.move(Tier.STORAGE, Tier.HOST, [], [0, 3], keys)
        rig.move(Tier.HOST, Tier.DEVICE, [3, 6, 5], [4, 2, 7])
        rig.settle()
        rig.store.clear(1.0)
        for name, values in made.items():
            on_host, on_device = host[name].clone(), values.clone()
            on_host[[2, 6]] = on_host[[0, 3]] = values[[5, 1]]
            on_device[[4, 2, 7]] = on_host[[3, 6, 5]]
            assert torch.equal(rig.rows(Tier.HOST)[name], on_host), (name, layouts)
            assert torch.equal(rig.rows(Tier.DEVICE)[name].cpu(), on_device), (name, layouts)


def test_pinned_memory_has_exactly_its_size(mover: Mover) -> None:
    """No rounding up to a power of two; and plain memory is refused at start."""
    size = (1 << 20) + 4097
    memory = mover.buffer(Tier.HOST, size)
    assert memory is not None
    assert (memory.numel(), int(memory.sum()), memory.is_pinned()) == (size, 0, True)
    with pytest.raises(ConfigError, match="the host pools of a CUDA device need pinned memory"):
        mover.order.device.accept(torch.zeros(1 << 16, dtype=torch.uint8).data_ptr())  # type: ignore[union-attr]


# -- order ---------------------------------------------------------------------------------------------------------------------------


def test_t020_a_backup_waits_for_the_writer(mover: Mover, fenced: bool) -> None:
    """The write is late, the backup is called right after it was enqueued; torch raises at any synchronise between."""
    rig, still_running, mismatches = Rig(mover, KINDS["kv"]), 0, 0
    rounds = ROUNDS if fenced else 20
    patterns = [{name: values.to(DEVICE) for name, values in rig.random(i, 1).items()} for i in range(rounds)]
    torch.cuda.synchronize()
    rig.move(Tier.DEVICE, Tier.HOST, [0], [2])  # what is allocated at first use is there now
    for i, pattern in enumerate(patterns):

        def engine(record: Compute, pattern: dict[str, torch.Tensor] = pattern) -> Outcome:
            torch.cuda._sleep(CYCLES)
            for name, rows in rig.rows(Tier.DEVICE).items():
                rows[:1].copy_(pattern[name])
            return Outcome()

        rig.engine = engine
        torch.cuda.set_sync_debug_mode("error")
        try:
            rig.compute(0)
            rig.move(Tier.DEVICE, Tier.HOST, [0], [2 + i % 3])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        still_running += not torch.cuda.current_stream().query()
        rig.settle()
        mismatches += any(not torch.equal(rig.rows(Tier.HOST)[name][2 + i % 3], p[0].cpu()) for name, p in pattern.items())
    assert mismatches == (0 if fenced else rounds)
    assert still_running > 0  # nobody had waited


def test_a_load_does_not_overwrite_what_a_running_forward_reads(mover: Mover, fenced: bool) -> None:
    rig, wrong = Rig(mover, KINDS["kv"]), 0
    for i in range(20):
        old, new = rig.random(2 * i, 1), rig.random(2 * i + 1, 1)
        for name in old:
            rig.rows(Tier.DEVICE)[name][:1].copy_(old[name])
            rig.rows(Tier.HOST)[name][3:4].copy_(new[name])
        torch.cuda.synchronize()
        seen: dict[str, torch.Tensor] = {}

        def engine(record: Compute, seen: dict[str, torch.Tensor] = seen) -> Outcome:
            torch.cuda._sleep(CYCLES)
            seen.update({name: rows[0].clone() for name, rows in rig.rows(Tier.DEVICE).items()})
            return Outcome()

        rig.engine = engine
        rig.compute(0, 1, start=PAGE)
        rig.move(Tier.HOST, Tier.DEVICE, [3], [0])
        rig.settle()
        wrong += any(not torch.equal(seen[name].cpu(), old[name][0]) for name in old)
        assert all(torch.equal(rig.rows(Tier.DEVICE)[name][0].cpu(), new[name][0]) for name in new)
    assert wrong == (0 if fenced else 20)


def test_a_layer_computes_as_soon_as_it_is_in(mover: Mover, fenced: bool) -> None:
    """Copies are held up before each layer; every layer is read when it is there, and the first before the last has been copied."""
    rig = Rig(mover, KINDS["kv"])
    device, wait_layer = rig.order.device, mover.by_layer()
    assert wait_layer is not None
    for name, rows in rig.rows(Tier.HOST).items():
        rows[3:4].copy_(rig.random(5, 1)[name])
    marks: dict[str, torch.cuda.Event] = {}
    copy = device.copy

    def mark(name: str, stream: torch.cuda.Stream) -> None:
        marks[name] = torch.cuda.Event(enable_timing=True)
        marks[name].record(stream)

    def held_up(pages: object, label: str) -> None:
        with torch.cuda.stream(device._stream):  # type: ignore[attr-defined]
            torch.cuda._sleep(CYCLES)
        copy(pages, label)  # type: ignore[arg-type]
        mark(label.split()[-1], device._stream)  # type: ignore[attr-defined]

    seen: list[dict[str, torch.Tensor]] = []

    def engine(record: Compute) -> Outcome:
        for layer in range(LAYERS):
            wait_layer(rig.name, layer)
            seen.append({name: rows[0, layer].clone() for name, rows in rig.rows(Tier.DEVICE).items()})
            mark(f"read {layer}", torch.cuda.current_stream())
        return Outcome()

    rig.engine = engine
    device.copy = held_up  # type: ignore[method-assign]
    torch.cuda.synchronize()
    rig.move(Tier.HOST, Tier.DEVICE, [3], [0])
    rig.compute(0, 1, start=PAGE)
    rig.settle()
    good = [all(torch.equal(layer[name].cpu(), rig.rows(Tier.HOST)[name][3, n]) for name in layer) for n, layer in enumerate(seen)]
    assert good == [fenced] * LAYERS
    assert marks["read 0"].elapsed_time(marks[str(LAYERS - 1)]) > 0


# -- models --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_a_restored_run_equals_the_cold_one(family: str, layout: str, mover: Mover, tmp_path: Path) -> None:
    """Attention, windows and states on the GPU: from the host, over other slots, with the device's pages gone in between."""
    loaded = load(family, tmp_path)
    model, spec, slots = loaded.model.to(DEVICE), loaded.spec, 48
    tiers = ((Tier.DEVICE, "layer_first"), (Tier.HOST, layout))
    pools = {
        tier: {c.name: Pool(c, MODEL_PAGE, slots, order, mover.buffer(tier, slots * c.page_bytes(MODEL_PAGE))) for c in spec.components}
        for tier, order in tiers
    }
    engine = Engine(model, spec, pools[Tier.DEVICE], mover.by_layer())
    rank = Rank(0, spec, pools, {c.name: b"t" * 16 for c in spec.components})
    executor = Executor(rank, mover, None, engine.run, time.monotonic)
    tokens, start, steps = prompt(3 * GRID + 20), 2 * GRID, 8
    pages = -(-(len(tokens) + steps) // MODEL_PAGE)

    def run(first_slot: int, begin: int) -> Outcome:
        """A record whose pages begin at that slot; snapshots of states at the grid lie there too, by their length."""
        slot = lambda length: first_slot + length // MODEL_PAGE  # noqa: E731
        paged, states = [c for c in spec.components if not c.is_state], [c.name for c in spec.components if c.is_state]
        tables = {c.name: np.arange(first_slot, first_slot + pages, dtype=np.int32) for c in paged}
        for c in paged:
            tables[c.name][: c.lo(begin) // MODEL_PAGE] = -1
        made = {s: tuple((n, slot(n)) for n in range(begin + GRID, len(tokens) + 1, GRID)) for s in states}
        resume = dict.fromkeys(states, slot(begin)) if begin else {}
        record = Compute(1, "r", begin, tokens[begin:], steps, GRID, tables, dict.fromkeys(states, slots - 1), resume, made)
        outcome = executor.execute(record)
        assert outcome.error == ""
        return outcome

    cold = run(0, 0)
    moved = np.arange(0, start // MODEL_PAGE + 1, dtype=np.int32)
    spans = tuple(Span(c.name, moved, moved) for c in spec.components)
    asked = Digest(0, "r", {c.name: moved for c in spec.components})
    before = executor.execute(asked).digests
    assert executor.execute(Move(0, "r", Tier.DEVICE, Tier.HOST, spans)).error == ""
    mover.order.drain()  # type: ignore[union-attr]
    for pool in pools[Tier.DEVICE].values():
        pool.buffer.fill_(255)
    torch.cuda.synchronize()
    back = tuple(Span(c.name, moved, moved + 20) for c in spec.components)
    assert executor.execute(Move(0, "r", Tier.HOST, Tier.DEVICE, back)).error == ""
    warm = run(20, start)
    assert (warm.output, warm.logprobs) == (cold.output, cold.logprobs)
    after = executor.execute(Digest(0, "r", {c.name: moved[: start // MODEL_PAGE] + 20 for c in spec.components})).digests
    for c in spec.components:
        used = slice(c.lo(start) // MODEL_PAGE, start // MODEL_PAGE) if not c.is_state else slice(0, 0)
        assert after[c.name][used] == before[c.name][: start // MODEL_PAGE][used]


# -- speed (printed, not judged) -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ORDERS)
def test_speed_is_told(layout: str, mover: Mover, capsys: pytest.CaptureFixture[str]) -> None:
    """32 pages of 4 MiB, both ways, next to one plain copy of as many bytes."""
    component = Component("full", Kind.FULL, (Field("k", 8, 128), Field("v", 8, 128)), tuple(range(16)))
    size = 32 * component.page_bytes(64)
    pools = [Pool(component, 64, 32, order, mover.buffer(t, size)) for t, order in ((Tier.DEVICE, "layer_first"), (Tier.HOST, layout))]
    order, slots = mover.order, np.random.default_rng(1).permutation(32)
    assert order is not None
    order.device.accept(pools[1].buffer.data_ptr())

    def seconds(act: Callable[[], None]) -> float:
        act()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            act()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / 5

    down, up = Copier(*pools, mover), Copier(*pools[::-1], mover)
    of, to = down.checked(slots, np.arange(32))
    device, host = (pool.buffer for pool in pools)
    acts: dict[str, Callable[[], object]] = {
        "backup": lambda: order.device.copy(down.pages(of, to), "backup"),
        "plain copy": lambda: host.copy_(device, non_blocking=True),
        "load": lambda: order.device.copy(up.pages(of, to), "load"),
        "plain copy back": lambda: device.copy_(host, non_blocking=True),
    }
    told = [f"{what} {size / seconds(act) / 1e9:.1f} GB/s" for what, act in acts.items()]
    with capsys.disabled():
        print(f"\n{mover.backend.name} {layout}: {', '.join(told)}")


if __name__ == "__main__":
    if MISSING:
        print(f"no GPU here, nothing is shown: {MISSING}")
        raise SystemExit(0)
    raise SystemExit(pytest.main([__file__, "-q", "-rs", "--import-mode=importlib", f"--rootdir={Path(__file__).resolve().parents[2]}"]))
