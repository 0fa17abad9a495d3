"""Why a request was served as it was: where each page came from, what limited the resume, what would have made it longer.

Of the last requests a small record is kept: lengths, ranges of pages, a few shortened keys. No prompt; of the first page its tokens, which
are never shown: with them L3 can be asked by which field what it holds of the prompt differs from what this group would read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from hicache_ray import lengths
from hicache_ray.explain_fields import Kept
from hicache_ray.keys import Namespace, tagged
from hicache_ray.resume import ORDER, Limit, Match
from hicache_ray.settings import Settings
from hicache_ray.spec import Tier
from hicache_ray.store import DIGEST_BYTES, KEY_BYTES
from hicache_ray.story import Ended, Event, Job
from hicache_ray.why import Evidence, Missing

#: Explanations that are kept.
KEPT = 1000
#: Bytes of a key that are shown.
SHOWN = 4

#: What the first missing thing is called, as the end of a sentence about it.
SENTENCES: Mapping[str, str] = {
    "never_stored": "was never stored here, or so long ago that nothing is known of it",
    "no_snapshot": "is a snapshot that nobody has made: its pages are there, its state is not",
    "not_canonical": "is there, but not from whole chunks of the grid, so that cache.exact does not take it",
    "evicted": "was evicted",
    "refused": "was refused by storage, which has no room for it",
    "write_failed": "could not be written to storage, which failed",
    "write_late": "was not taken by storage in time",
    "write_detached": "was on its way to storage when that was detached",
    "quota": "was refused by storage: the tenant is at its cap (tenants.NAME.max_bytes)",
    "other_namespace": "is in storage under another namespace",
    "other_objects": "is in storage as other objects",
    "went_meanwhile": "went before the request had its turn on the device",
}


class Explainer:
    """The last ``kept`` requests of a group. ``capped``: tenants whose bytes in L3 have a cap."""

    def __init__(self, settings: Settings, capped: Collection[str] = (), kept: int = KEPT) -> None:
        self._settings, self._capped, self._most = settings, frozenset(capped), kept
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def hear(self, event: Event) -> None:
        """Of the events of a group the ends of requests are remembered."""
        if not isinstance(event, Ended) or event.job is None:
            return
        job, page = event.job, event.job.request.namespace.page_size
        told = record(job, self._settings, self._capped)
        told["error"] = "" if event.error is None else f"{type(event.error).__name__}: {event.error}"
        self._kept.pop(event.rid, None)
        self._kept[event.rid] = Kept(told, job.request.namespace, np.array(job.request.tokens[:page]))
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def find(self, rid: str) -> Kept | None:
        """None where the request is not known here: not ended yet, forgotten, or another group's."""
        return self._kept.get(rid)

    def explain(self, rid: str, differs: tuple[str, ...] = ()) -> dict[str, Any] | None:
        """The record of a request. ``differs``: what :func:`hicache_ray.explain_fields.foreign_fields` says of its first page now."""
        kept = self._kept.get(rid)
        return None if kept is None else with_fields(kept.told, kept.namespace, differs)


def with_fields(told: Mapping[str, Any], namespace: Namespace, differs: tuple[str, ...]) -> dict[str, Any]:
    """The same where what was never stored turns out to be in L3, only not for this group."""
    out = dict(told)
    if not differs or not lacks_all(told):
        return out
    cause = "other_namespace" if set(differs) <= set(namespace.record()) else "other_objects"
    cause = "not_canonical" if "recipe.bytes" in differs else cause
    sentence = f"{SENTENCES[cause]}; it differs in {', '.join(differs)}"
    out["limit"] = {"cause": cause, "sentence": sentence, "fields": list(differs)}
    return out


def lacks_all(told: Mapping[str, Any]) -> bool:
    """Whether nothing was known of the first page already: then others may have stored it, only not for this group."""
    return told["limit"]["cause"] == "never_stored" and told["longer"]["missing"][0]["page"] < told["step_tokens"] // told["page_tokens"]


def record(job: Job, settings: Settings, capped: Collection[str]) -> dict[str, Any]:
    """What is told of a request, as plain data. Pages are ranges ``[first, last + 1)`` of base pages; lengths are in tokens."""
    evidence, request = job.evidence, job.request
    page = request.namespace.page_size
    out: dict[str, Any] = {
        "request_id": request.rid,
        "tenant": request.namespace.tenant,
        "prompt_tokens": len(request.tokens),
        "page_tokens": page,
        "resumed_tokens": 0 if job.resumed is None else job.resumed.length * page,
        "sources": {},
        "limit": {"cause": "not_planned", "sentence": "it ended before its resume was planned"},
        "longer": None,
    }
    if evidence is None:
        return out
    found = evidence.found
    out |= {
        "step_tokens": settings.step(found.spec),
        "planned_at_s": round(evidence.when, 6),
        "planned_tokens": evidence.chosen.length * page,
        "most_tokens": found.ceiling * page,
        "legal": _legal(found, evidence),
        "decision": dict(evidence.decision),
    }
    if job.resumed is not None:
        for part in job.resumed.parts:
            out["sources"].setdefault(part.component, {})[part.tier.value] = ranges(part.pages)
    told = [_missing(m, evidence, request.namespace.tenant in capped) for m in evidence.missing]
    out["limit"] = _limit(job, evidence, told)
    if evidence.longer:
        out["longer"] = {"tokens": evidence.longer * page, "missing": told, "otherwise": "" if told else out["limit"]["sentence"]}
    return out


def _limit(job: Job, evidence: Evidence, told: list[dict[str, Any]]) -> dict[str, Any]:
    limit = job.limit
    if limit in (Limit.ABSENT, Limit.NONE) and job.resumed is not None and job.resumed.length < evidence.chosen.length:
        return {"cause": "went_meanwhile", "sentence": f"what the plan needs {SENTENCES['went_meanwhile']}"}
    if limit is Limit.ABSENT and told:
        first = told[0]
        return {"cause": first["cause"], "sentence": first["sentence"]}
    return {"cause": limit.name.lower(), "sentence": limit.value}


def _missing(missing: Missing, evidence: Evidence, capped: bool) -> dict[str, Any]:
    page = evidence.found.spec.page_size
    end = (missing.page + 1) * page
    cause = "quota" if missing.kind == "refused" and capped else missing.kind
    key = missing.name[KEY_BYTES - DIGEST_BYTES :][:SHOWN].hex()
    what = f"snapshot at {end}" if evidence.found.spec[missing.component].is_state else f"page that ends at {end}"
    sentence = f"the {what} of component {missing.component!r} (key {key}) {SENTENCES[cause]}"
    out: dict[str, Any] = {"component": missing.component, "page": missing.page, "key": key, "cause": cause}
    if missing.went is not None:
        went = missing.went
        ago = evidence.when - went.when
        out["went"] = {"tier": went.tier.value, "at_s": round(went.when, 6), "ago_s": round(ago, 6), "for": went.cause, "why": went.why}
        if cause == "evicted":
            sentence += f" from the {went.tier.value} tier {ago:.3f} s before, for {went.cause!r} ({went.why})"
    return out | {"sentence": sentence}


def _legal(found: Match, evidence: Evidence) -> dict[str, Any]:
    """Lengths (in base pages) that each component allows, by what any tier has; and of each rank, where ranks differ."""
    out: dict[str, Any] = {"allowed": _of(found.allowed), "together": _of(found.lengths(*ORDER)), "components": {}, "ranks": {}}
    top, page = found.ceiling, found.spec.page_size
    for c in found.spec.components:
        tiers = {tier.value: lengths.lengths_of(c, bits.get(c.name, 0), top, page) for tier, bits in found.present.items()}
        any_tier = lengths.lengths_of(c, found.anywhere(c.name), top, page)
        out["components"][c.name] = {"any": _of(any_tier)} | {tier: _of(bits) for tier, bits in tiers.items()}
        local = reduce(or_, (found.present.get(tier, {}).get(c.name, 0) for tier in (Tier.DEVICE, Tier.HOST)), 0)
        per_rank = [local | bits for bits in _per_rank(evidence, c.name)]
        if any(bits != per_rank[0] for bits in per_rank):
            out["ranks"][c.name] = [_of(lengths.lengths_of(c, bits, top, page)) for bits in per_rank]
    return out


def _per_rank(evidence: Evidence, component: str) -> list[int]:
    both = [evidence.told.get(tagged(component, kind), ()) for kind in (False, True)]
    return [reduce(or_, (told[rank] for told in both if rank < len(told)), 0) for rank in range(max(map(len, both)))]


def ranges(numbers: Any) -> list[tuple[int, int]]:
    """Ascending integers as runs ``[first, last + 1)``."""
    values = np.asarray(numbers, dtype=np.int64)
    if not len(values):
        return []
    cuts = np.flatnonzero(np.diff(values) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(values, cuts)]


def _of(bits: int) -> list[tuple[int, int]]:
    """The members of a set of lengths as runs."""
    out = []
    while bits:
        first = (bits & -bits).bit_length() - 1
        run = (~(bits >> first) & ((bits >> first) + 1)).bit_length() - 1
        out.append((first, first + run))
        bits &= ~(lengths.ones(first + run))
    return out


def lines(told: Mapping[str, Any]) -> list[str]:
    """A record as sentences."""
    out = [f"request {told['request_id']}: resumed at {told['resumed_tokens']:,} of {told['prompt_tokens']:,} tokens"]
    for component, tiers in told["sources"].items():
        out.append(f"  {component}: " + "; ".join(f"{tier} {shown(runs)}" for tier, runs in tiers.items()))
    out.append(f"limit: {told['limit']['sentence']}")
    longer = told["longer"]
    if longer is not None:
        out.append(f"the next longer resume, at {longer['tokens']:,} tokens, lacked:")
        out += [f"  {m['sentence']}" for m in longer["missing"]] or [f"  nothing; {longer['otherwise']}"]
    legal = told.get("legal")
    if legal is not None:
        out.append(
            f"legal lengths in pages of {told['page_tokens']}: allowed {shown(legal['allowed'])}; together {shown(legal['together'])}"
        )
        out += [f"  {name}: " + "; ".join(f"{t} {shown(r)}" for t, r in rows.items()) for name, rows in legal["components"].items()]
        for name, rows in legal["ranks"].items():
            out += [f"  {name}, rank {rank}: {shown(runs)}" for rank, runs in enumerate(rows)]
    if told.get("decision"):
        out.append("decision: " + ", ".join(f"{name} {value}" for name, value in told["decision"].items()))
    if told.get("error"):
        out.append(f"it ended with {told['error']}")
    return out


def shown(runs: Any, most: int = 6) -> str:
    """Runs for people: ``[0, 13) [20, 21) ...``."""
    text = [f"[{first}, {last})" for first, last in runs]
    return " ".join([*text[:most], *(["..."] if len(text) > most else [])]) or "none"
