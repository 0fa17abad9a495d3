"""Who asks in a simulated world: families of branching prompts, requests over them, prefetches that are held, callers who give up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from hicache_ray.keys import Namespace
from hicache_ray.records import Embedded
from hicache_ray.simulate_cases import Case
from hicache_ray.simulate_content import Contents, Prompt
from hicache_ray.simulate_drop import Drops
from hicache_ray.simulate_group import Member
from hicache_ray.simulate_settings import LIFETIMES_S, PAGE, PRIORITIES, choose
from hicache_ray.simulate_store import Later
from hicache_ray.spec import Tier
from hicache_ray.store import SPACE_BYTES
from hicache_ray.story import Request, Wait

#: Prompts that are asked for at any time; the oldest make way for new ones.
LIVE = 20
#: Share of prompts that fork from another one, at any token.
FORKS = 0.7
#: Share of prompts in which something is embedded.
EMBEDDED = 0.15


class Load:
    """Arrivals over the groups of a world."""

    def __init__(self, rng: random.Random, case: Case, contents: Contents, members: Sequence[Member], drops: Drops, later: Later) -> None:
        self.rng = rng
        self.case = case
        self.contents = contents
        self.members = members
        self.drops = drops
        self.later = later
        self.spaces = [Namespace("simulated", page_size=PAGE), Namespace("simulated", page_size=PAGE, salt="another", tenant="another")]
        self.prompts: list[Prompt] = []
        self.count = 0
        for _ in range(LIVE):
            self._new_prompt()

    def _new_prompt(self) -> None:
        rng, longest = self.rng, self.case.prompt_pages * PAGE
        parent = rng.choice(self.prompts) if self.prompts and rng.random() < FORKS else None
        head: list[int] = []
        space = self.spaces[0] if rng.random() < 0.85 else self.spaces[1]
        if parent is not None:
            head, space = parent.values[: rng.randint(0, len(parent.values))], parent.namespace if rng.random() < 0.9 else space
        fresh = [rng.getrandbits(24) for _ in range(rng.randint(2, longest))]
        # A decode runs a few tokens further than the longest prompt.
        tokens = (head + fresh)[:longest] + [rng.getrandbits(24) for _ in range(4)]
        self.prompts.append(self.contents.prompt(space, tokens, self._spans(parent, len(head), len(tokens))))
        if len(self.prompts) > LIVE:
            del self.prompts[rng.randrange(LIVE // 2)]

    def _spans(self, parent: Prompt | None, shared: int, count: int) -> list[Embedded]:
        """In the first half: a prompt does not end inside of what is embedded. Where prompts share tokens they do not always share that."""
        rng = self.rng
        spans = [s for s in parent.spans if s.start + s.count <= min(shared, count // 2)] if parent is not None else []
        if spans and rng.random() < 0.3:
            spans.pop()
        if rng.random() < EMBEDDED and count >= 4:
            start = rng.randint(0, count // 2 - 1)
            span = Embedded(start, rng.randint(1, min(20, count // 2 - start)), rng.randbytes(16))
            spans += [] if any(s.touches(span.start, span.start + span.count) for s in spans) else [span]
        return spans

    def arrive(self) -> None:
        """One thing that somebody asks for."""
        rng, member = self.rng, self.rng.choice(self.members)
        self.count += 1
        if self.count % 12 == 0:
            self._new_prompt()
        what = rng.random()
        if self.case.calm or what < 0.78:
            self.request(member)
        elif what < 0.93:
            self._prefetch(member)
        elif what < 0.965:
            self._evict(member)
        elif what < 0.985:
            self._flush(member)
        elif what < 0.992:
            self.drops.begin(rng.choice(self.spaces).digest()[:SPACE_BYTES])
        else:
            self._detach(member)

    def _ask(self, kind: str) -> tuple[str, Prompt, Request]:
        rng = self.rng
        prompt = rng.choice(self.prompts)
        new = min(rng.choice([1, 1, 2, 5, 14]), len(prompt.values) - 1)
        count = len(prompt.values) - new if rng.random() < 0.7 else rng.randint(1, len(prompt.values) - new)
        begun = max((s.start + s.count for s in prompt.spans), default=0)
        if count < begun:
            count, new = begun, min(new, len(prompt.values) - begun)
        limit = rng.randint(0, count) if rng.random() < 0.1 else None
        rid = f"{kind[0]}{self.count}"
        digests = rng.random() < 0.1
        hints = (0, None) if self.case.calm else (choose(rng, PRIORITIES), choose(rng, LIFETIMES_S))
        return rid, prompt, Request(rid, prompt.tokens[:count], prompt.namespace, new, limit, digests, prompt.spans, *hints)

    def request(self, member: Member) -> None:
        rid, prompt, request = self._ask("request")
        if not member.begin("request", rid, prompt, request) or self.case.calm:
            return
        fate = self.rng.random()
        if fate < 0.1:
            self.later(self.rng.random() ** 2 * 0.5, lambda: self._cancel(member, rid))
        elif fate < 0.15:
            self.later(self.rng.random() ** 2 * 0.3, lambda: self._preempt(member, rid, prompt, request))

    def _preempt(self, member: Member, rid: str, prompt: Prompt, request: Request) -> None:
        """A request makes way for others, and comes back under its own id."""
        if rid in member.asked:
            self._cancel(member, rid)
            self.later(self.rng.random() * 0.2, partial(member.begin, "request", rid, prompt, request))

    def _cancel(self, member: Member, rid: str) -> None:
        asked = member.asked.get(rid)
        if asked is not None:
            asked.cancelled = True
            member.act(lambda: member.group.cancel(rid))

    def _prefetch(self, member: Member) -> None:
        rid, prompt, request = self._ask("prefetch")
        if member.begin("prefetch", rid, prompt, request):
            self.later(self.rng.random() ** 2, lambda: self._go_on(member, rid))

    def _go_on(self, member: Member, rid: str) -> None:
        """Whoever holds a prefetch goes on with it when it is ready, or has lost interest."""
        if rid not in member.asked:
            return
        if self.rng.random() < 0.25:
            self._cancel(member, rid)
            return
        tale = member.group._tales.get(rid)
        if tale is not None and tale.waits is Wait.HOLD:
            member.act(lambda: self._proceed(member, rid))
        self.later(0.05 + self.rng.random(), lambda: self._go_on(member, rid))

    @staticmethod
    def _proceed(member: Member, rid: str) -> None:
        member.group.proceed(rid)

    def _evict(self, member: Member) -> None:
        tier = self.rng.choice([Tier.DEVICE, Tier.HOST])
        res = member.res
        need = {c.name: self.rng.randint(0, res.room((tier, c.name))) for c in member.around.spec.components}
        member.act(lambda: member.group.evict(tier, need))

    def _flush(self, member: Member) -> None:
        rng = self.rng
        tiers = [t for t in Tier if rng.random() < (0.3 if t is Tier.STORAGE else 0.6)]
        member.flush(tiers, rng.choice([None, 0.05, 5.0]))

    def _detach(self, member: Member) -> None:
        """L3 is taken away from a group for a while."""
        member.attach(False)
        self.later(self.rng.random() * 0.6, lambda: member.attach(True))

    def let_go(self) -> None:
        """Nobody holds anything any more, and L3 is there."""
        for member in self.members:
            member.attach(True)
            for rid, asked in list(member.asked.items()):
                if asked.kind == "prefetch":
                    self._cancel(member, rid)
