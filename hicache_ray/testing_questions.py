"""What the test kit is asked: what is where, how far a request could resume, which bytes are there and which there should be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

from hicache_ray import lengths
from hicache_ray.ask import ask
from hicache_ray.cache import Cache
from hicache_ray.copies_fake import FakeDevice
from hicache_ray.errors import Cancelled, HiCacheError
from hicache_ray.explain import Explainer
from hicache_ray.explain_fields import differing_fields, foreign_fields
from hicache_ray.group import Envelope, Group
from hicache_ray.keys import Namespace, as_tokens, other, page_keys, tagged
from hicache_ray.match import match
from hicache_ray.records import Compute, Embedded, Lane, Lookup, Tokens, lane_of
from hicache_ray.residency import Residency
from hicache_ray.resume import ORDER, Match, Path
from hicache_ray.spec import CacheSpec, Component, Tier
from hicache_ray.storage.faults import FaultyStore
from hicache_ray.story import Job
from hicache_ray.testing_parts import ContentEngine, Poll, Probe

TIERS: Mapping[str, Tier] = {"l1": Tier.DEVICE, "l2": Tier.HOST, "l3": Tier.STORAGE}


class Questions:
    """The part of :class:`hicache_ray.testing.Stack` that changes nothing (but for :meth:`drop`)."""

    page: int
    exact: bool
    pools: Mapping[str, Component]
    namespace: Mapping[str, str]
    recipe: Mapping[str, str]
    store: FaultyStore | None
    devices: Sequence[FakeDevice]
    executed: list[list[Envelope]]
    spec: CacheSpec
    res: Residency
    cache: Cache
    ns: Namespace
    tags: Mapping[str, tuple[bytes, ...]]
    group: Group
    explainer: Explainer
    errors: dict[str, Exception]
    _engines: list[ContentEngine]
    _jobs: dict[str, Job]

    def probe(self, tokens: Iterable[int], limit: int | None = None, **more: Any) -> Probe:
        """How far a request could resume. Changes nothing."""
        tokens, ns = as_tokens(list(tokens)), self._namespace(more.get("namespace", {}))
        found = match(self.res, self._path(tokens, ns, more.get("spans", ())), self.cache.allowed(len(tokens), limit), not self.exact)
        assert self.store is not None
        told: dict[str, tuple[int, ...]] = {}
        for keys, names in self.cache.questions(found):
            told |= ask(self.store, self.tags, Lookup(0, "probe", keys, names)).found
        found = found.with_storage(told)
        l1, l2, l3 = (found.longest(t) * self.page for t in ORDER)
        differs: tuple[str, ...] = ()
        if l3 < lengths.longest(found.allowed) * self.page:
            differs = differing_fields(self.store, ns, tokens, self.spec, self.recipe)
        return Probe(l1, l2, l3, found.longest(*ORDER) * self.page, differs)

    def have(self, tier: str, pool: str, tokens: Iterable[int], rank: int = 0) -> set[int]:
        """Page indices (of states: lengths) of a path that a tier has."""
        keys = self._path(as_tokens(list(tokens))).names(pool)
        if TIERS[tier] is Tier.STORAGE:
            assert self.store is not None
            tags = [self.tags[tagged(pool, kind)][rank] for kind in self._kinds]
            bits = reduce(or_, (answer.hit for answer in self.store.lookup(keys, tags, 1.0).values()))
        else:
            place = (TIERS[tier], pool)
            bits = reduce(or_, (self.res.index.present(place, self.res.index.find(names)) for names in self._names(keys)))
        return {self._number(pool, i) for i in range(len(keys)) if bits >> i & 1}

    def drop(self, tier: str, pool: str, tokens: Iterable[int], which: Iterable[int], rank: int | None = None) -> None:
        """Remove some pages (lengths) of a path from a tier; from L3 on one rank or on all."""
        keys = self._path(as_tokens(list(tokens))).names(pool)
        chosen = [keys[self._index(pool, w)] for w in which]
        if TIERS[tier] is not Tier.STORAGE:
            for names in self._names(chosen):
                entries = self.res.index.find(names)
                self.res.withdraw((TIERS[tier], pool), entries[self.res.index.slots((TIERS[tier], pool), entries) >= 0])
            return
        assert self.store is not None
        for kind in self._kinds:
            of = self.tags[tagged(pool, kind)]
            for tag in of if rank is None else (of[rank],):
                self.store.drop([k + tag for k in chosen], 1.0)

    def draft(self, rid: str, pool: str) -> int:
        """How many tokens of its cache the draft was told to hold when the request began to compute."""
        for envelope in self.executed[0]:
            if isinstance(envelope.record, Compute) and envelope.record.rid == rid:
                return envelope.record.valid[pool]
        raise HiCacheError(f"request {rid} has not begun to compute")

    def read(self, tokens: Iterable[int], pool: str, rank: int = 0) -> bytes:
        """Bytes of what the longest resume from the device would use of a pool, in canonical order."""
        self._settle_devices()
        tokens = as_tokens(list(tokens))
        found = self._found(tokens)
        names = found.path.names(pool, [i for i in self._used(tokens, pool) if self.spec.owns(self.spec[pool], rank, i)])
        slots = self.res.slots((Tier.DEVICE, pool), self.res.index.find(names))
        return b"".join(self._engines[rank].read(self.spec[pool], int(slot)) for slot in slots)

    def made(self, tokens: Iterable[int], pool: str, rank: int = 0) -> bytes:
        """The bytes that a recompute would give in the place of :meth:`read`."""
        tokens = as_tokens(list(tokens))
        engine = self._engines[rank]
        mine = [i for i in self._used(tokens, pool) if self.spec.owns(self.spec[pool], rank, i)]
        return b"".join(engine.content(self.spec[pool], tokens, (i + 1) * self.page) for i in mine)

    def _path(self, tokens: Tokens, ns: Namespace | None = None, spans: Sequence[Embedded] = ()) -> Path:
        return self.cache.path(page_keys(ns or self.ns, tokens, spans), tokens, spans)

    def _found(self, tokens: Tokens) -> Match:
        """What the device alone has of a prompt."""
        allowed = self.cache.allowed(len(tokens))
        return match(self.res, self._path(tokens), allowed, not self.exact).only(Tier.DEVICE)

    def _used(self, tokens: Tokens, pool: str) -> range:
        return lengths.needed(self.spec[pool], self._found(tokens).longest(Tier.DEVICE), self.page)

    @property
    def _kinds(self) -> tuple[bool, ...]:
        """Canonical bytes, and others where they count."""
        return (False,) if self.exact else (False, True)

    def _names(self, keys: Sequence[bytes]) -> list[list[bytes]]:
        return [[other(k) if kind else k for k in keys] for kind in self._kinds]

    def explain(self, rid: str) -> dict[str, Any]:
        """Why a request that has ended went as it did. Raises where it is not known."""
        kept = self.explainer.find(rid)
        assert self.store is not None
        differs = () if kept is None else foreign_fields(self.store, kept, self.spec, self.recipe, self.exact)
        told = self.explainer.explain(rid, differs)
        if told is None:
            raise HiCacheError(f"nothing is known of a request {rid}")
        return told

    def poll(self, rid: str) -> Poll:
        job = self._jobs[rid]
        state: str = job.phase.value
        if rid in self.errors:
            state = "cancelled" if isinstance(self.errors[rid], Cancelled) else "failed"
        return Poll(state, 0 if rid in self.errors else job.promised, job.limit.value)

    def audit(self) -> None:
        """Raises unless every count, lease and link is consistent, and every rank has executed its records in the one order.

        A rank computes, copies and talks to storage beside each other; the order is that of the records of one kind.
        """
        self._settle_devices()
        self.group.check()
        for lane in Lane:
            first, *others = ([e.record.id for e in executed if lane_of(e.record) is lane] for executed in self.executed)
            if any(mine[: len(first)] != first[: len(mine)] for mine in others):
                raise HiCacheError(f"two ranks have executed {lane} records in different orders")

    def _settle_devices(self) -> None:
        """What is enqueued is done; raises what a rank's engine has found wrong meanwhile."""
        for device in self.devices:
            device.settle()

    def _namespace(self, more: Mapping[str, str]) -> Namespace:
        return Namespace(**{"model": "test", "page_size": self.page, **self.namespace, **more})  # type: ignore[arg-type]

    def _number(self, pool: str, index: int) -> int:
        return (index + 1) * self.page if self.spec[pool].is_state else index

    def _index(self, pool: str, number: int) -> int:
        return number // self.page - 1 if self.spec[pool].is_state else number
