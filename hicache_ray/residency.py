"""What one cache group holds in L1 and L2: index, slots, leases and policies, kept in step.

The stages ask and change it; it takes no decision. A *place* is a (tier, component) pair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import Inconsistent
from hicache_ray.index import ABSENT, Index
from hicache_ray.keys import is_other, space_of
from hicache_ray.lease import Lease, Leases, Place
from hicache_ray.ledger import DROP, FLUSH, Gone
from hicache_ray.policies import make
from hicache_ray.policy import Lru
from hicache_ray.policy_order import Bytes, Cost, Entries, Worth, order
from hicache_ray.records import Slots
from hicache_ray.settings import Eviction
from hicache_ray.slots import SlotPool
from hicache_ray.spec import CacheSpec, Kind, Tier
from hicache_ray.standing import NO_HINT, Hint, Standing

LOCAL = (Tier.DEVICE, Tier.HOST)
#: What has left and nobody has asked about yet; whoever drives a group asks at every step.
GONE = 4096


@dataclass
class Counters:
    """What happened in one place since the start, in pages (snapshots). ``inserted_other``: those of them whose bytes are not canonical."""

    inserted: int = 0
    inserted_other: int = 0
    adopted: int = 0
    evictions: int = 0
    backups: int = 0
    refused: int = 0
    failures: int = 0
    dropped: int = 0


@dataclass
class Residency:
    """One per cache group. ``capacity``: slots per place. ``storage``: whether L3 is attached now. ``era``: how many drops there were.
    ``gone``: what has left since somebody has last emptied it. ``now``: the group's clock."""

    spec: CacheSpec
    capacity: Mapping[Place, int]
    pools: dict[Place, SlotPool] = field(init=False)
    policies: dict[Place, Lru] = field(init=False)
    counters: dict[Place, Counters] = field(init=False)
    index: Index = field(init=False)
    leases: Leases = field(init=False)
    storage: bool = True
    era: int = 0
    gone: deque[Gone] = field(default_factory=lambda: deque(maxlen=GONE))
    now: Callable[[], float] = lambda: 0.0
    standing: dict[str, Standing] = field(init=False)
    _dropped: dict[bytes, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pools = {place: SlotPool(n) for place, n in self.capacity.items()}
        self.counters = {place: Counters() for place in self.pools}
        self.counters |= {(Tier.STORAGE, c.name): Counters() for c in self.spec.components}
        self.index = Index(self.pools)
        self.leases = Leases(self.pools)
        self.choose(Eviction.LRU, 1)

    def choose(self, eviction: Eviction, step: int) -> None:
        """How to evict from now on; nothing is cached yet. ``step``: base pages between the lengths that may be resumed from."""
        chained = {c.name: c.kind is Kind.FULL for c in self.spec.components}
        self.policies = {place: make(eviction, n, chained[place[1]], self.index.marks) for place, n in self.capacity.items()}
        self.standing = {c.name: Standing(c, self.spec.page_size, step) for c in self.spec.components}

    def room(self, place: Place) -> int:
        """Slots that are free or could be, by eviction alone."""
        return self.pools[place].free + self.pools[place].idle

    def reserve(self, place: Place) -> int:
        """Host slots that what leaves the device passes through on its way to L3. Requests that wait for the device lease them not at all,
        the one who has it only while L3 does not have the pages that are in them."""
        capacity = self.capacity[place]
        return min(capacity // 2, max(1, capacity // 32)) if place[0] is Tier.HOST else 0

    def touch(self, place: Place, entries: Entries) -> None:
        """Pages of one path (root first) were held or moved together. The request that this is for counts as a use when it ends."""
        self._touch(place, entries, used=False)

    def touch_in_order(self, place: Place, entries: Entries) -> None:
        """The same, and they should go in the order in which they are given."""
        self.policies[place].touch(entries, self._worth(place, entries), used=False)

    def use(self, component: str, names: Sequence[bytes], pages: Sequence[int], keys: Sequence[bytes], hint: Hint = NO_HINT) -> None:
        """A request has used or made the objects ``names`` of the path with the page ``keys``, at these base pages (ascending): most
        recent in every local tier that has them."""
        entries = self.index.find(names)
        there = entries != ABSENT
        known, standing = entries[there], self.standing[component]
        standing.say(known, hint)
        standing.path(known, np.asarray(pages)[there].tolist(), keys)
        for tier in LOCAL:
            self._touch((tier, component), known[self.index.slots((tier, component), known) != ABSENT], used=True)

    def _touch(self, place: Place, entries: Entries, used: bool) -> None:
        c = self.spec[place[1]]
        run = max(1, -(-c.reach // (self.spec.page_size * c.page_span))) if c.kind in (Kind.WINDOW, Kind.CHUNKED) else 1
        going = entries[order(c.kind, len(entries), run)]
        self.policies[place].touch(going, self._worth(place, going), used)

    def _worth(self, place: Place, entries: Entries) -> Worth:
        standing = self.standing[place[1]]
        return Worth(self.costs(place, entries), standing.priority(entries), standing.expires(entries))

    def costs(self, place: Place, entries: Entries) -> Bytes:
        """What losing cached entries of a place costs, as :class:`Cost`."""
        host = (Tier.HOST, place[1])
        copied = self.index.slots(host, entries) != ABSENT if place[0] is Tier.DEVICE else self.index.durable(host, entries)
        ends = self.standing[place[1]].ends(entries)
        return np.where(copied, Cost.COPY, np.where(ends, Cost.END, Cost.INNER)).astype(np.int8)

    def _recost(self, place: Place, entries: Entries) -> None:
        """What the entries cost there may have changed: another tier has got them, or has lost them."""
        here = entries[self.index.slots(place, entries) != ABSENT]
        self.policies[place].recost(here, self.costs(place, here))

    def set_durable(self, component: str, entries: Entries, sealed: bool | npt.NDArray[np.bool_] = True) -> None:
        """A hint: L3 has sealed these objects, or it turned out that it has not. Skips those that are absent."""
        place = (Tier.HOST, component)
        self.index.set_durable(place, entries, sealed)
        self._recost(place, entries[entries != ABSENT])

    def clear_durable(self) -> None:
        """L3 was emptied or taken away."""
        self.index.clear_durable()
        for c in self.spec.components:
            self._recost((Tier.HOST, c.name), self.index.in_place((Tier.HOST, c.name)))

    def publish(self, place: Place, keys: Sequence[bytes], pages: npt.NDArray[np.int32], lease: Lease) -> Entries:
        """The bytes in the leased slots are complete: cache them under ``keys``. ``pages``: the base page that each ends with.

        A page that is cached already stays as it is (the first insert wins) and the leased slot of the newcomer is free once the lease is
        given back. Returns the entries of all keys.
        """
        old = self.index.slots(place, self.index.find(keys)) != ABSENT
        fresh = [k for k, there in zip(keys, old, strict=True) if not there]
        slots = lease.slots[~old]
        known = self.index.find(fresh)
        entries = self.index.put(place, fresh, slots)
        for standing in self.standing.values():
            standing.begin(entries[known == ABSENT])
        if place[0] is Tier.HOST:
            self._recost((Tier.DEVICE, place[1]), entries)
        self.pools[place].publish(slots, entries)
        self.counters[place].inserted += len(fresh)
        self.counters[place].inserted_other += sum(map(is_other, fresh))
        self.counters[place].adopted += len(keys) - len(fresh)
        out = self.index.find(keys)
        self.index.set_depth(out, pages)
        return out

    def withdraw(self, place: Place, entries: Entries) -> None:
        """Pages leave a place. Slots that somebody still leases become free when the last lease is given back."""
        self.policies[place].forget(entries)
        slots = self.index.remove(place, entries)
        self.pools[place].withdraw(slots)
        if place[0] is Tier.HOST:
            self._recost((Tier.DEVICE, place[1]), entries)

    def left(self, place: Place, entries: Entries, why: str) -> None:
        """Tell that pages are about to be withdrawn, or are refused by L3."""
        if len(entries):
            self.gone.append(Gone(place, tuple(map(self.index.key, entries.tolist())), why))

    def others(self, place: Place) -> int:
        """How many of the cached pages have bytes that are not canonical."""
        return sum(is_other(self.index.key(entry)) for entry in self.index.in_place(place).tolist())

    def idle(self, place: Place, entries: Entries) -> np.ndarray:
        """Which entries are cached in the place and leased by nobody."""
        slots = self.index.slots(place, entries)
        there = slots != ABSENT
        out = there.copy()
        out[there] = ~self.pools[place].pinned(slots[there])
        return out

    def slots(self, place: Place, entries: Entries) -> Slots:
        """Slots of entries that must be there."""
        slots = self.index.slots(place, entries)
        if (slots == ABSENT).any():
            raise Inconsistent(f"a planned page is not in the {place[0].value} pool {place[1]!r} although it was leased")
        return slots

    def clear(self, tier: Tier) -> None:
        """Withdraw everything from a tier."""
        for place in self.pools:
            if place[0] is tier:
                self.left(place, self.index.in_place(place), FLUSH)
                self.withdraw(place, self.index.in_place(place))

    def drop(self, space: bytes) -> Mapping[Tier, int]:
        """Everything of a namespace's space leaves both tiers, leased or not; whoever uses it still has its slots, and nothing else.

        Returns how many pages and snapshots there were. What began before this is stale: see :meth:`stale`.
        """
        self.era += 1
        self._dropped[space] = self.era
        removed = dict.fromkeys(LOCAL, 0)
        for place in self.pools:
            entries = self.index.in_place(place)
            mine = entries[np.fromiter((space_of(self.index.key(e)) == space for e in entries.tolist()), dtype=bool, count=len(entries))]
            removed[place[0]] += len(mine)
            self.left(place, mine, DROP)
            self.withdraw(place, mine)
        return removed

    def stale(self, name: bytes, era: int) -> bool:
        """Whether what a name (of an object, or of a space) belongs to was dropped after ``era``: bytes from before are not published."""
        return self._dropped.get(space_of(name), 0) > era

    def check(self) -> None:
        """Raise :class:`Inconsistent` unless counts, leases and links agree: free + held + cached = capacity, leased is resident."""
        self.index.check()
        self.leases.check()
        for place, pool in self.pools.items():
            pool.check()
            self.policies[place].check()
            entries = self.index.in_place(place)
            self.index.depth(entries)
            if len(entries) != pool.cached:
                raise Inconsistent(f"the {place[0].value} pool {place[1]!r} caches {pool.cached} pages and the index knows {len(entries)}")
            if not bool(np.all(self.policies[place].knows(entries))):
                raise Inconsistent(f"a page in the {place[0].value} pool {place[1]!r} is not in its order of eviction")
            said, true = self.policies[place].costs(entries), self.costs(place, entries)
            if np.any((said != true) & (said > Cost.EXPIRED)):
                raise Inconsistent(f"what losing a page of the {place[0].value} pool {place[1]!r} costs is not what its policy goes by")
        for standing in self.standing.values():
            standing.check()
