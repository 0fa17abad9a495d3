"""How memory is split between pools, and what fits them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ray import compute, machine
from hicache_ray.errors import ConfigError, HiCacheError
from hicache_ray.settings import Settings, StateSnapshots
from hicache_ray.sizing import Memory, Mix, confined, footprint, host_share, longest_prompt, prompt_bytes, split, warnings
from hicache_ray.sizing_plan import device_slots
from hicache_ray.spec import CacheSpec
from hicache_ray.testing import Stack, chunked, full, state, window
from tests.core.drive import prompt

PAGE = 4
#: name -> components; whose snapshots and pages weigh unlike, and whose pages are wide.
SHAPES = {
    "full": {"full": full()},
    "hybrid": {"full": full(), "state": state(8)},
    "heavy states": {"full": full(layers=1), "state": state(layers=9)},
    "windows": {"full": full(), "swa": window(10), "chunk": chunked(8), "state": state()},
    "wide": {"full": full(), "wide": full(page_span=2, ratio=2), "state": state(8)},
}


def spec_of(shape: str, ranks: int = 1) -> CacheSpec:
    return Stack(page=PAGE, pools=SHAPES[shape], ranks=ranks, l1=1, l2=1).spec


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.lists(st.integers(2, 60), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from(StateSnapshots),
)
def test_prompts_that_fit_the_host_are_restorable_as_a_whole(shape: str, counts: list[int], exact: bool, kept: StateSnapshots) -> None:
    """The host's budget is what lets these prompts in, to the byte; then all of them are there after the device was emptied, whichever
    snapshots of a path are kept."""
    spec, core = spec_of(shape), Settings(grid=8 if exact else 0, exact=exact, track_interval=PAGE, state_snapshots=kept)
    mix = Mix(min(counts), max(counts))
    if not prompt_bytes(spec, core, max(counts)):
        return
    wanted = sum(prompt_bytes(spec, core, n) for n in counts)
    budget = wanted
    while (made := split(spec, core, budget, mix)).restorable < wanted:  # what a budget leaves unused for the mix is asked for on top
        budget += wanted - made.restorable
    assert made.size <= budget
    more = {"state_snapshots": kept}
    stack = Stack(page=PAGE, pools=SHAPES[shape], l1=64, l2=made.slots, l3=0, exact=exact, grid=8 if exact else None, settings=more)
    stack.detach()
    prompts = [prompt(i, n) for i, n in enumerate(counts)]
    for tokens in prompts:
        stack.put(tokens)
        stack.settle()
    stack.flush(l1=True, l2=False)
    for tokens in prompts:
        last = (len(tokens) - 1) // core.step(spec) * core.step(spec)
        best = max((n for n in range(0, last + 1, core.step(spec)) if _snapshots_at(spec, core, len(tokens), n)), default=0)
        assert stack.probe(tokens).l2 == best
        assert stack.put(tokens).l2 == best
        stack.flush(l1=True, l2=False)
    stack.audit()


def _snapshots_at(spec: CacheSpec, core: Settings, tokens: int, length: int) -> bool:
    """Whether every state of a prompt makes a snapshot at a length."""
    shape = compute.Shape.cold(tokens, 1)
    return length == 0 or all(length in compute.snapshot_lengths(c, core, shape, spec) for c in spec.components if c.is_state)


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kept", StateSnapshots)
def test_a_footprint_is_what_the_engine_makes(shape: str, exact: bool, kept: StateSnapshots) -> None:
    spec, core = spec_of(shape), Settings(grid=8 if exact else 0, exact=exact, track_interval=PAGE, state_snapshots=kept)
    for tokens in range(1, 70):
        top = tokens // 8 * 8 if exact else tokens
        made = compute.Shape.cold(tokens, 1)
        for c in spec.components:
            want = sum(n <= top for n in compute.snapshot_lengths(c, core, made, spec)) if c.is_state else top // (PAGE * c.page_span)
            assert footprint(spec, core, tokens)[c.name] == want


def test_one_length_gets_the_whole_budget_and_the_split_is_that_of_a_prompt() -> None:
    spec, core = spec_of("hybrid"), Settings(grid=8, track_interval=PAGE)
    unit = prompt_bytes(spec, core, 33)
    made = split(spec, core, 10 * unit, Mix(33, 33))
    assert made.slots == {"full": 80, "state": 40}
    assert made.restorable == made.size == 10 * unit
    # Whatever the device's ratio of pages to snapshots is, and however many lengths are asked for at once.
    assert split(spec, core, 10 * unit, Mix(8, 64)).slots == {"full": 80, "state": 40}


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.sampled_from(sorted(SHAPES)), st.sampled_from(StateSnapshots), st.lists(st.integers(8, 2000), min_size=1, max_size=30))
def test_what_a_split_promises_has_slots(shape: str, kept: StateSnapshots, counts: list[int]) -> None:
    """Whichever snapshots are kept, few long and many short prompts alike."""
    spec, core = spec_of(shape), Settings(grid=8, track_interval=PAGE, state_snapshots=kept)
    mix = Mix(min(counts), max(counts))
    wanted = sum(prompt_bytes(spec, core, n) for n in counts)
    low, high = 1, 4 * wanted
    while high - low > 1:  # the least budget that promises this much
        middle = (low + high) // 2
        low, high = (low, middle) if split(spec, core, middle, mix).restorable >= wanted else (middle, high)
    made = split(spec, core, high, mix)
    for name, n in made.slots.items():
        assert sum(footprint(spec, core, count)[name] for count in counts) <= n
    # The price of not knowing the lengths: with snapshots of every path at most one more budget for each further component.
    assert high <= len(spec.components) * wanted + sum(c.page_bytes(PAGE) for c in spec.components)


def test_snapshots_that_are_kept() -> None:
    """Beside the last one always one that the same prompt can resume from: 80 and 72; going back from there, 64, 48 and 16."""
    spec, core = spec_of("hybrid"), [Settings(grid=8, track_interval=PAGE, state_snapshots=kept) for kept in StateSnapshots]
    assert [footprint(spec, each, 80)["state"] for each in core] == [10, 5, 2]
    assert [footprint(spec, each, 81)["state"] for each in core] == [10, 5, 1]
    assert all(footprint(spec, each, 7) == {"full": 0, "state": 0} for each in core)
    # Where the two lie apart a prompt may need more than a longer one: what is promised is that of the shorter as well.
    last = replace(core[2], exact=False, grid=0)
    assert [longest_prompt(spec, last, {"full": 99, "state": n}) for n in (1, 2)] == [12, 99 * PAGE]


def test_a_device_has_slots_for_the_snapshots_that_a_request_makes() -> None:
    for kept in StateSnapshots:
        spec, core = spec_of("hybrid"), Settings(grid=8, track_interval=PAGE, state_snapshots=kept)
        unit = prompt_bytes(spec, core, 80)
        slots, snapshots = device_slots(spec, core, 3 * unit + 2 * spec.snapshot_bytes(), 80)
        need = compute.need(spec, core, compute.Shape.cold(80, 1))
        assert slots == {"full": 3 * need["full"], "state": 3 * (need["state"] - 1) + 2}
        assert snapshots == slots["state"]


def test_the_longest_prompt_is_the_last_that_fits() -> None:
    spec, core = spec_of("wide"), Settings(grid=8, track_interval=PAGE)
    slots = {"full": 9, "wide": 5, "state": 4}
    longest = longest_prompt(spec, core, slots)
    assert longest == 32
    assert all(n <= slots[name] for name, n in footprint(spec, core, longest).items())
    assert any(n > slots[name] for name, n in footprint(spec, core, longest + 8).items())
    assert longest_prompt(spec, core, dict.fromkeys(slots, 0)) == 0


def test_warnings() -> None:
    core = Settings(grid=8, track_interval=PAGE)
    assert warnings(spec_of("full"), core, 64, device=10, host=20) == ()
    heavy, small = warnings(spec_of("heavy states"), core, 64, device=20, host=10)
    assert heavy.startswith("snapshots outweigh the KV: ")
    assert small.startswith("the host pools (10 bytes) are smaller than the device's (20)")


def test_what_makes_no_sense_is_refused() -> None:
    spec, core = spec_of("full"), Settings(grid=8, track_interval=PAGE)
    for wrong in (lambda: Mix(9, 8), lambda: Mix(0, 8), lambda: host_share(100, 10, 0.0, 4)):
        with pytest.raises(ConfigError):
            wrong()
    with pytest.raises(ConfigError, match="prompts of up to 7 tokens leave nothing to restore; plan for at least 8 tokens"):
        split(spec, core, 1000, Mix(1, 7))


# -- the machine ---------------------------------------------------------------------------------------------------------------------


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 800 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


K = 1024


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        ({}, 1000 * K, 800 * K),
        # v2: the tightest of the groups around us, the page cache that can be given back apart
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": f"{500 * K}\n", "sys/fs/cgroup/a/memory.current": f"{450 * K}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon 7\ninactive_file {100 * K}\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/memory.current": "5\n",
            },
            500 * K, 150 * K,
        ),
        # v1, beside a v2 hierarchy without controllers; the path is the host's, and only the mount's top is there
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:memory,hugetlb:/docker/xyz\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{600 * K}\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{50 * K}\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
            },
            600 * K, 550 * K,
        ),
        # v1 without a limit says a huge number
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            },
            1000 * K, 800 * K,
        ),
        # a limit above the machine changes nothing, one whose use cannot be read is none
        (
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{5000 * K}\n", "sys/fs/cgroup/memory.current": "1\n"},
            1000 * K, 800 * K,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "17\n"}, 1000 * K, 800 * K),
        # over its limit
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "17\n", "sys/fs/cgroup/memory.current": "20\n"}, 17, 0),
    ],
    ids=["machine", "v2", "v1", "v1 unlimited", "above", "unreadable", "over"],
)  # fmt: skip
def test_a_control_group_wins_over_the_machine(tmp_path: Path, files: dict[str, str], total: int, free: int) -> None:
    found = machine.memory(tree(tmp_path, files))
    assert (found.total, found.free) == (total, free)
    assert (found.limit == "machine") == (total == 1000 * K)


def test_a_machine_that_does_not_tell(tmp_path: Path) -> None:
    with pytest.raises(HiCacheError, match="cannot be read from .*meminfo"):
        machine.memory(tmp_path)


def test_the_tightest_of_several() -> None:
    found = confined(Memory(100, 50), [Memory(80, 60, "outer"), Memory(90, 20, "inner")])
    assert found == Memory(80, 20, "outer")


def test_shares_are_equal_and_leave_the_reserve() -> None:
    free = int(np.random.default_rng(0).integers(1 << 34))
    share = host_share(free, 1 << 30, 0.7, 3)
    assert 0 <= (free - (1 << 30)) * 0.7 - 3 * share < 4
    assert host_share(10, 10, 1.0, 1) == host_share(5, 10, 1.0, 1) == 0
