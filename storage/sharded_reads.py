"""How a store of many nodes answers: lookup and get."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import TypeVar

from hicache_ray.errors import StoreError
from hicache_ray.keys import group_of
from hicache_ray.storage import bits
from hicache_ray.storage.connection import Deadline
from hicache_ray.storage.members import Member, View
from hicache_ray.storage.peers import NodeHandle, Peers, Sent, finish, half, settle
from hicache_ray.store import KEY_BYTES, Answer, Bytes, Store

T = TypeVar("T")

_HEAL_S = 0.25


@dataclass(frozen=True)
class Asked:
    """One call: who is alive for it, the peers, and until when it may take. ``here``: the node whose store is asked directly."""

    here: str
    view: View
    peers: Peers
    deadline: Deadline

    def handle(self) -> NodeHandle | None:
        """This node's own; None where this process is on no node of the cluster. Raises StoreError."""
        member = self.view.member(self.here)
        return None if member is None else self.peers.of(member).handle()

    def local(self) -> Store | None:
        """This node's own store. Raises StoreError."""
        handle = self.handle()
        return None if handle is None else handle.store

    def others(self) -> Mapping[str, Member]:
        """The other nodes' members that are alive, by their name in the directory."""
        return {holder: member for holder, member in self.view.holders.items() if member.node != self.here}

    def send(self, member: Member, call: Callable[[NodeHandle, float], T]) -> Sent[T]:
        return self.peers.of(member).send(call, self.deadline)


def by_group(names: Sequence[bytes]) -> Mapping[bytes, Sequence[int]]:
    """Positions of ``names`` (keys or ids) by their group; a path has one or two."""
    groups = [group_of(name) for name in names]
    if groups and groups.count(groups[0]) == len(groups):
        return {groups[0]: range(len(groups))}
    out: dict[bytes, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        out[group].append(i)
    return out


def by_home(view: View, names: Sequence[bytes]) -> Mapping[Member | None, Sequence[int]]:
    """Positions of ``names``, ascending, by the home of their group; None where nobody is alive."""
    homes: dict[Member | None, Sequence[int]] = {}
    for group, positions in by_group(names).items():
        home = view.home(group)
        homes[home] = sorted([*homes[home], *positions]) if home in homes else positions
    return homes


def at(values: Sequence[T], positions: Sequence[int]) -> Sequence[T]:
    """The values at these positions."""
    return values if len(positions) == len(values) else [values[i] for i in positions]


# -- lookup --------------------------------------------------------------------------------------------------------------------------


def lookup(asked: Asked, keys: Sequence[bytes], tags: Sequence[bytes]) -> Mapping[bytes, Answer]:
    """The union of what this node has and what the homes know of the others. What no home could say is to be retried."""
    sent: list[tuple[Sequence[int], Sent[Mapping[bytes, Mapping[str, int]]]]] = []
    unsure = 0
    if asked.view.before:
        moving = [positions for group, positions in by_group(keys).items() if asked.view.moving(group)]
        unsure = reduce(or_, [bits.only(len(keys), positions) for positions in moving], 0)
    for home, positions in by_home(asked.view, keys).items():
        if home is None:
            unsure |= bits.only(len(keys), positions)
        else:
            sent.append((positions, asked.send(home, _where(at(keys, positions), tags))))
    answers = _local_answers(asked, keys, tags)
    if answers is None:
        unsure, answers = (1 << len(keys)) - 1, {}
    settle([one for _, one in sent], asked.deadline)
    elsewhere = dict.fromkeys(tags, 0)
    others = asked.others()
    for positions, one in sent:
        try:
            found = one.result()
        except StoreError:
            unsure |= bits.only(len(keys), positions)
            continue
        for tag in tags:
            held = 0
            for holder, mask in found.get(tag, {}).items():
                held |= mask if holder in others else 0
            elsewhere[tag] |= bits.spread(held, positions)
    return {tag: _merge(answers.get(tag, Answer()), elsewhere[tag], unsure) for tag in tags}


def _where(keys: Sequence[bytes], tags: Sequence[bytes]) -> Callable[[NodeHandle, float], Mapping[bytes, Mapping[str, int]]]:
    return lambda node, left: node.directory.where(keys, tags, left)


def _local_answers(asked: Asked, keys: Sequence[bytes], tags: Sequence[bytes]) -> Mapping[bytes, Answer] | None:
    """None where this node's store does not answer."""
    try:
        store = asked.local()
        return {} if store is None else store.lookup(keys, tags, asked.deadline.left())
    except StoreError:
        return None


def _merge(local: Answer, elsewhere: int, unsure: int) -> Answer:
    hit = local.hit | elsewhere
    pending = local.pending & ~hit
    return Answer(hit, pending, (local.retry | unsure) & ~hit & ~pending)


def visible(store: Store, ids: Sequence[bytes], timeout_s: float) -> int:
    """Bitset of the ids that a store's own lookup finds. The tags in a batch are few."""
    by_tag: dict[bytes, list[int]] = defaultdict(list)
    for i, id in enumerate(ids):
        by_tag[id[KEY_BYTES:]].append(i)
    out = 0
    for tag, positions in by_tag.items():
        out |= bits.spread(store.lookup([ids[i][:KEY_BYTES] for i in positions], [tag], timeout_s)[tag].hit, positions)
    return out


# -- get -----------------------------------------------------------------------------------------------------------------------------


@dataclass
class Search:
    """Where the ids of one call may be found. ``left``: position -> holders not tried yet. ``stale``: holders that had it not."""

    asked: Asked
    ids: Sequence[bytes]
    left: dict[int, list[Member]] = field(default_factory=dict)
    stale: dict[Member, list[bytes]] = field(default_factory=lambda: defaultdict(list))

    def ask(self, positions: Sequence[int], guess: int) -> None:
        """Ask the homes. ``guess``: how many nodes in the order of a group may hold it though its home does not answer."""
        homes = by_home(self.asked.view, [self.ids[i] for i in positions])
        sent = []
        for home, places in homes.items():
            mine = [positions[j] for j in places]
            if home is not None:
                sent.append((mine, self.asked.send(home, _holders([self.ids[i] for i in mine]))))
        settle([one for _, one in sent], half(self.asked.deadline))
        others, here = self.asked.others(), self.asked.view.member(self.asked.here)
        for mine, one in sent:
            try:
                found = one.result()
            except StoreError:
                for i in mine:
                    self.left[i] = [m for m in self.asked.view.ranked(group_of(self.ids[i]))[:guess] if m.node != self.asked.here]
                continue
            for i, holders in zip(mine, found, strict=True):
                self.left[i] = [others[holder] for holder in holders if holder in others]
                if here is not None and here.holder in holders:
                    self.stale[here].append(self.ids[i])  # asked before, in vain

    def next(self, wanted: int) -> Mapping[Member, list[int]]:
        """Whom to ask for which of the positions in ``wanted``, the load spread evenly; those holders are used up."""
        load: Counter[Member] = Counter()
        out: dict[Member, list[int]] = defaultdict(list)
        for i in bits.each(wanted):
            holders = self.left.get(i)
            if holders:
                chosen = min(holders, key=lambda member: load[member])
                holders.remove(chosen)
                load[chosen] += 1
                out[chosen].append(i)
        return out


def _holders(ids: Sequence[bytes]) -> Callable[[NodeHandle, float], Sequence[tuple[str, ...]]]:
    return lambda node, left: node.directory.holders(ids, left)


def get(asked: Asked, ids: Sequence[bytes], targets: Sequence[Bytes], guess: int) -> int:
    """From this node, then from the holders in parallel, then from who else holds what is missing."""
    hit = 0
    error: StoreError | None = None
    try:
        store = asked.local()
        hit = 0 if store is None else store.get(ids, targets, asked.deadline.left())
    except StoreError as failed:
        error = failed
    missing = ((1 << len(ids)) - 1) & ~hit
    if missing and not asked.deadline.passed():
        search = Search(asked, ids)
        search.ask(list(bits.each(missing)), guess)
        while missing and not asked.deadline.passed() and (who := search.next(missing)):
            hit |= _fetch(search, who, targets)
            missing &= ~hit
        heal(search)
    if error is not None and not hit:
        raise error
    return hit


def _fetch(search: Search, who: Mapping[Member, list[int]], targets: Sequence[Bytes]) -> int:
    """One get per holder. A holder that is not the last one gets half of the time, so that another one can be asked."""
    asked, hit = search.asked, 0
    sent = []
    for member, positions in who.items():
        share = 0.5 if any(search.left.get(i) for i in positions) else 1.0
        sent.append((positions, asked.send(member, _get(search.ids, targets, positions, share))))
    finish([one for _, one in sent], asked.deadline)
    for positions, one in sent:
        try:
            got = one.result()
        except StoreError:
            continue
        hit |= bits.spread(got, positions)
        search.stale[one.member].extend(search.ids[i] for j, i in enumerate(positions) if not got >> j & 1)
    return hit


def _get(ids: Sequence[bytes], targets: Sequence[Bytes], mine: Sequence[int], share: float) -> Callable[[NodeHandle, float], int]:
    return lambda node, left: node.store.get(at(ids, mine), at(targets, mine), left * share)


def heal(search: Search) -> None:
    """Tell the homes what is no longer where they believed. What is there after all (and has another length) stays.

    The caller has what it asked for, and waits for this a moment at most; what is not known by then is healed by the next one.
    """
    asked = search.asked
    stale = {member: ids for member, ids in search.stale.items() if ids}
    if not stale or asked.deadline.passed():
        return
    now = asked.deadline.clock()
    moment = Deadline(asked.deadline.clock, min(now + _HEAL_S, asked.deadline.at))
    looks = [(ids, asked.send(member, _visible(ids))) for member, ids in stale.items()]
    settle([one for _, one in looks], moment)
    told: list[Sent[None]] = []
    for ids, look in looks:
        if not look.done():
            continue
        try:
            there = look.result()
        except StoreError:
            continue
        gone = [id for i, id in enumerate(ids) if not there >> i & 1]
        for home, positions in by_home(asked.view, gone).items():
            if home is not None:
                told.append(asked.send(home, _withdraw(look.member.holder, [gone[i] for i in positions])))
    settle(told, moment)


def _visible(ids: Sequence[bytes]) -> Callable[[NodeHandle, float], int]:
    return lambda node, left: visible(node.store, ids, left)


def _withdraw(holder: str, ids: Sequence[bytes]) -> Callable[[NodeHandle, float], None]:
    return lambda node, left: node.directory.withdraw(holder, ids, left)
