"""The conformance suite: what every store does, whatever it is made of. Run it against yours; ours all pass it.

With pytest, say how a store is made::

    class TestMyStore(StoreConformance):
        abilities = Abilities(eviction=Eviction.APPROXIMATE)

        @contextmanager
        def make_store(self, capacity_bytes):
            store = MyStore(capacity_bytes)
            yield store
            store.close()

Without it::

    print(check(lambda capacity_bytes: closing(MyStore(capacity_bytes)), Abilities(damages=False)))

``capacity_bytes`` is room for ``ROOM`` pages of ``PAGE`` bytes. A store may be handed out again, emptied: counters are compared with
what they were. Rules that a store cannot keep (:class:`Abilities`) are skipped with a sentence.
"""

from __future__ import annotations

import traceback
import unittest
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from hicache_ray.storage.conformance_kit import (
    PAGE,
    ROOM,
    Abilities,
    Broken,
    Clock,
    Eviction,
    Gate,
    Rules,
)
from hicache_ray.storage.conformance_leases import LeaseRules
from hicache_ray.storage.conformance_objects import ObjectRules
from hicache_ray.storage.conformance_room import RoomRules
from hicache_ray.storage.conformance_threads import ThreadRules
from hicache_ray.store import Store

__all__ = ["PAGE", "ROOM", "Abilities", "Broken", "Clock", "Eviction", "Gate", "Report", "StoreConformance", "Verdict", "check", "rules"]


class StoreConformance(ObjectRules, RoomRules, LeaseRules, ThreadRules):
    """All rules, each a method ``test_...``. Subclass it in a test suite and override ``make_store`` (and ``abilities``)."""


@dataclass(frozen=True)
class Verdict:
    """``outcome``: ``passed | failed | skipped``. ``why``: how it failed, or why it was skipped. ``trace``: where it failed."""

    rule: str
    outcome: str
    why: str = ""
    trace: str = ""

    def __str__(self) -> str:
        return f"{self.outcome:8}{self.rule}" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True)
class Report:
    """One verdict per rule, in the order of the rules. As a text: one line each, and a sum."""

    verdicts: tuple[Verdict, ...]

    def of(self, outcome: str) -> list[str]:
        """Rules with that outcome."""
        return [verdict.rule for verdict in self.verdicts if verdict.outcome == outcome]

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return not self.of("failed")

    def __str__(self) -> str:
        counts = ", ".join(f"{len(self.of(outcome))} {outcome}" for outcome in ("passed", "failed", "skipped"))
        return "\n".join([*map(str, self.verdicts), counts])


def rules(suite: type[Rules] = StoreConformance) -> list[str]:
    """Names of all rules: methods ``test_...`` without that beginning, topic by topic."""
    methods = [method for base in suite.__mro__ for method in vars(base) if method.startswith("test_")]
    return [method.removeprefix("test_") for method in dict.fromkeys(methods)]


def check(
    make_store: Callable[[int], AbstractContextManager[Store]], abilities: Abilities | None = None, only: tuple[str, ...] = ()
) -> Report:
    """Try every rule (or those named in ``only``) on a store of its own. Never raises for what a store does wrong."""
    suite = type("Suite", (StoreConformance,), {"abilities": abilities or Abilities(), "make_store": staticmethod(make_store)})
    return Report(tuple(_try(suite(), rule) for rule in only or rules()))


def _try(suite: Rules, rule: str) -> Verdict:
    try:
        getattr(suite, f"test_{rule}")()
    except unittest.SkipTest as skipped:
        return Verdict(rule, "skipped", str(skipped))
    except Exception as error:
        why = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        return Verdict(rule, "failed", why, traceback.format_exc())
    return Verdict(rule, "passed")
