"""Clients that send requests of shared prefixes without a pause, and keep a record of every one."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.actors.rig import GRID, prompt

NEW_TOKENS = 4
FAMILIES, TAILS = 6, 2
#: Longest wait of a client for an answer. A request that takes longer hangs.
DEADLINE_S = 60.0


def prompts(families: int = FAMILIES) -> list[list[int]]:
    """Families that share two chunks; each member has one chunk and some tokens of its own."""
    shared = [prompt(9000 + f, 2 * GRID) for f in range(families)]
    return [shared[f] + prompt(9100 + f * TAILS + t, GRID + 1 + 7 * t) for f in range(families) for t in range(TAILS)]


@dataclass(frozen=True)
class Expected:
    """The answer computed without the tier (``tokens``), and the bits of a cold computation (``logprobs``)."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Sent:
    """One request. Times on the clock of this process; ``error``: what the client was told at last; ``wrong``: not the expected answer."""

    began: float
    ended: float
    which: int
    replica: str = ""
    reused: int = 0
    total: int = 0
    retries: int = 0
    wrong: bool = False
    error: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def hung(self) -> bool:
        return self.seconds > DEADLINE_S


@dataclass
class Clients:
    """``retrying``: may a client send a request again that was not answered? Only while a whole node dies."""

    url: str
    work: Sequence[Sequence[int]]
    expected: Sequence[Expected]
    count: int = 8
    retrying: bool = False
    sent: list[Sent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop, self._go = threading.Event(), threading.Event()
        self._busy = [threading.Lock() for _ in range(self.count)]
        self._under_way = [0.0] * self.count  # when each client's request began; 0: it has none
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(self.count)]

    def start(self) -> Clients:
        self._go.set()
        for thread in self._threads:
            thread.start()
        return self

    def pause(self) -> None:
        """Returns when no request is under way."""
        self._go.clear()
        until = time.monotonic() + 2 * DEADLINE_S
        for lock in self._busy:
            if lock.acquire(timeout=max(0.0, until - time.monotonic())):
                lock.release()

    def resume(self) -> None:
        self._go.set()

    def close(self) -> None:
        self._stop.set()
        self._go.set()
        for thread in self._threads:
            thread.join(2 * DEADLINE_S)

    def since(self, at: float) -> list[Sent]:
        """Requests that began then or later, in the order of their beginnings, as far as all have ended: a slow one is not passed over."""
        under_way = [began for began in self._under_way if began and began >= at]
        ended = sorted((one for one in list(self.sent) if one.began >= at), key=lambda one: one.began)
        return [one for one in ended if not under_way or one.began < min(under_way)]

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        with httpx.Client() as http:
            while not self._stop.is_set():
                self._go.wait(1.0)
                with self._busy[number]:
                    if self._go.is_set() and not self._stop.is_set():
                        began = self._under_way[number] = time.monotonic()
                        self.sent.append(self.ask(http, chance.randrange(len(self.work)), began))
                        self._under_way[number] = 0.0

    def ask(self, http: httpx.Client, which: int, began: float) -> Sent:
        """One request, to its end."""
        tokens = self.work[which]
        body = {"input_ids": list(tokens), "max_new_tokens": NEW_TOKENS, "return_logprob": True}
        error = ""
        for retries in itertools.count():
            try:
                response = http.post(f"{self.url}/generate", json=body, timeout=DEADLINE_S + 5.0)
                if response.status_code == 200:
                    return self._seen(response.json(), which, began, retries)
                error = f"{response.status_code}: {response.text[:200]}"
            except httpx.HTTPError as failed:
                error = f"{type(failed).__name__}: {failed}"
            if not self.retrying or time.monotonic() - began > DEADLINE_S:
                return Sent(began, time.monotonic(), which, total=len(tokens), retries=retries, error=error)
            time.sleep(0.2)
        raise AssertionError

    def _seen(self, answer: dict[str, Any], which: int, began: float, retries: int) -> Sent:
        wanted, reused = self.expected[which], sum(answer["cached_tokens"].values())
        same = tuple(answer["output_ids"]) == wanted.tokens and (not wanted.logprobs or tuple(answer["logprobs"]) == wanted.logprobs)
        whole = reused + answer["computed_tokens"] == len(self.work[which])
        return Sent(began, time.monotonic(), which, answer["replica"], reused, len(self.work[which]), retries, not (same and whole))


#: Requests over which service is judged, and which share of the usual hit rate counts as back.
WINDOW, SHARE = 16, 0.9


def hit_rate(requests: Sequence[Sent]) -> float:
    total = sum(one.total for one in requests)
    return sum(one.reused for one in requests) / total if total else 0.0


def back(requests: Sequence[Sent], usual: float, replicas: int) -> float | None:
    """When service was back: from then on ``WINDOW`` requests, begun one after the other, were all answered, by all replicas, at the usual
    hit rate. None where that has not happened (yet)."""
    for start in range(len(requests) - WINDOW + 1):
        window = requests[start : start + WINDOW]
        well = not any(one.error or one.wrong for one in window)
        if well and len({one.replica for one in window}) >= replicas and hit_rate(window) >= SHARE * usual:
            return window[0].began
    return None
