"""Asks the other members, again and again, whether they are there, and tells :class:`~hicache_ray.storage.members.Members`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from hicache_ray.errors import StoreError
from hicache_ray.storage.lanes import Lane
from hicache_ray.storage.members import Member, Members

log = logging.getLogger("hicache_ray.storage")
_JOIN_S = 2.0


class Prober:
    """``ping(member, timeout_s)`` returns the incarnation that answers, or raises StoreError.

    Pings run in parallel, one at most per member: one that hangs past its deadline is a miss in every round until it ends, so a frozen node
    costs one thread and delays nobody. ``pause(seconds)`` returns True when the prober should stop; a test brings its own.
    """

    def __init__(
        self,
        here: str,
        members: Members,
        ping: Callable[[Member, float], str],
        pause: Callable[[float], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._here, self._members, self._ping, self._clock = here, members, ping, clock
        self._stopping = threading.Event()
        self._pause = pause or self._stopping.wait
        self._lanes: dict[str, Lane] = {}
        self._asking: dict[str, Future[str]] = {}  # node -> the last ping
        self._thread: threading.Thread | None = None

    def start(self) -> Prober:
        self._thread = threading.Thread(target=self._run, name="hicache-prober", daemon=True)
        self._thread.start()
        return self

    def step(self) -> None:
        """One round: ping everyone else; who has not answered within the deadline of a ping has missed it. Who could not be asked has
        missed nothing."""
        timeout_s = self._members.config.ping_timeout_s
        others = [member for member in self._members.everyone() if member.node != self._here]
        for node in set(self._lanes) - {member.node for member in others}:
            self._lanes.pop(node).close(0.0)
            self._asking.pop(node, None)
        fresh: dict[str, Future[str]] = {}
        for member in [member for member in others if self._free(member.node)]:
            try:
                fresh[member.node] = self._send(member, timeout_s)
            except StoreError:  # no thread is to be had, which the lane has logged
                others.remove(member)
        wait(fresh.values(), timeout_s)
        for member in others:
            answer = self._answer(fresh.get(member.node))
            if answer is None:
                self._members.missed(member.node)
            else:
                self._members.heard(member.node, answer)

    def close(self) -> None:
        """Idempotent. A ping that hangs is left to its deadline."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        Lane.close_all(self._lanes.values(), _JOIN_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = self._clock()
            try:
                self.step()
            except Exception:  # whatever it was: without this thread no death would be noticed again
                log.exception("a round of pings failed; the next one goes on")
            if self._pause(max(0.0, began + self._members.config.ping_s - self._clock())):  # rounds start ``ping_s`` apart
                return

    def _free(self, node: str) -> bool:
        return node not in self._asking or self._asking[node].done()

    def _send(self, member: Member, timeout_s: float) -> Future[str]:
        lane = self._lanes.setdefault(member.node, Lane(f"ping-{member.node}", 1))
        self._asking[member.node] = lane.submit(lambda: self._ping(member, timeout_s))
        return self._asking[member.node]

    @staticmethod
    def _answer(ping: Future[str] | None) -> str | None:
        """The incarnation that answered in time."""
        if ping is None or not ping.done():
            return None
        try:
            return ping.result()
        except Exception:  # whatever is wrong with it: it did not answer, and the prober lives on
            return None
