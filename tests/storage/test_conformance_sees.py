"""The conformance suite sees what is wrong, names it, and can be run without a test framework."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hicache_ray.storage import MemoryStore
from hicache_ray.storage.conformance import Abilities, Eviction, StoreConformance, check, rules
from hicache_ray.store import Store
from tests.storage.broken_more import BROKEN, maker
from tests.storage.stores import Staged


@pytest.mark.parametrize(("kind", "rule"), BROKEN)
def test_a_broken_store_fails_at_its_rule(kind: type[MemoryStore], rule: str) -> None:
    report = check(*maker(kind), only=(rule,))
    assert report.of("failed") == [rule], report
    (verdict,) = report.verdicts
    assert verdict.why
    assert not verdict.why.startswith(("TypeError", "AttributeError", "KeyError", "NameError"))
    assert "Traceback" in verdict.trace


@pytest.mark.parametrize("kind", [MemoryStore, Staged])
def test_a_sound_store_passes_all(kind: type[MemoryStore]) -> None:
    report = check(*maker(kind))
    assert report.ok, report
    assert [verdict.rule for verdict in report.verdicts] == rules()
    skipped = {"a_get_longer_than_its_lease_is_a_miss"}
    held = {rule for rule in rules() if "under_way" in rule or "fence" in rule or "complete" in rule}
    assert set(report.of("skipped")) == (skipped if kind is Staged else skipped | held)
    assert str(report).endswith(f"{len(rules()) - len(report.of('skipped'))} passed, 0 failed, {len(report.of('skipped'))} skipped")


def test_a_store_that_can_less_is_asked_less_and_says_so() -> None:
    able = Abilities(Eviction.APPROXIMATE, exact_room=False, counts=False, lends=False, describes=False, damages=False)

    @contextmanager
    def make(capacity_bytes: int) -> Iterator[Store]:
        yield MemoryStore(capacity_bytes)

    report = check(make, able)
    assert report.ok, report
    why = {verdict.rule: verdict.why for verdict in report.verdicts if verdict.outcome == "skipped"}
    assert len(why) > 15
    assert why["a_flipped_bit_is_a_miss_and_is_gone_then"] == "this store has no damage(id)"
    assert why["the_oldest_goes"] == "the order in which this store evicts, or its room, is not exact"
    assert all(why.values())


def test_a_store_that_cannot_be_made_is_a_failure_of_every_rule() -> None:
    def make(capacity_bytes: int) -> Iterator[Store]:
        raise RuntimeError("no disk")

    report = check(make, only=("empty_batches", "drop_says_what_existed"))  # type: ignore[arg-type]
    assert [(v.outcome, v.why) for v in report.verdicts] == 2 * [("failed", "RuntimeError: no disk")]


def test_rules_go_from_objects_to_threads() -> None:
    assert rules()[0] == "it_is_a_store"
    assert rules()[-1] == "a_drop_revokes_a_put_under_way"
    assert all(hasattr(StoreConformance, f"test_{rule}") for rule in rules())


def test_every_rule_is_broken_by_somebody() -> None:
    assert sorted({rule for _, rule in BROKEN}) == sorted(rules())


def test_it_needs_no_test_framework() -> None:
    code = (
        "import sys, contextlib\n"
        "from hicache_ray.storage import MemoryStore, conformance\n"
        "print(conformance.check(lambda room: contextlib.closing(MemoryStore(room)), only=('empty_batches',)))\n"
        "assert 'pytest' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("passed  empty_batches\n1 passed, 0 failed, 0 skipped\n", "")
