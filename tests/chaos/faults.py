"""The faults: each strikes, waits for the first ping of whatever takes the place of what was struck, and says when both happened."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from hicache_ray.actors import names
from tests.actors.rig import kill
from tests.chaos.clients import WINDOW, Clients, back, hit_rate
from tests.chaos.house import House
from tests.chaos.tier import Tier

#: How long something is frozen, or a link cut.
PAUSE_S = 6.0
#: Longest wait for a first ping, and then for service.
PING_S, SERVICE_S = 120.0, 120.0
#: Windows of requests that warm the tier up at least; and a hit rate that grows by less is the usual one.
WARM_UP, RISING = 4, 0.02
NODES = ("a", "b", "c")
VICTIM = "c"


@dataclass(frozen=True)
class Struck:
    """``at``: when; ``mended``: when it was resumed or mended, or replaced by us, else ``at``; ``pinged``: the first ping after that, None
    where there was none."""

    at: float
    mended: float
    pinged: float | None


@dataclass(frozen=True)
class Result:
    """A row of the table. ``wrong``, ``lost``, ``hung``: requests. ``left``: what stayed at rest; ``worst_s``: the slowest answer."""

    fault: str
    to_ping_s: float | None
    to_service_s: float | None
    hits: float
    usual: float
    requests: int
    wrong: int
    lost: int
    hung: int
    retries: int
    worst_s: float
    left: str
    errors: tuple[str, ...] = ()

    @property
    def met(self) -> bool:
        well = self.to_service_s is not None and self.to_service_s <= 10.0
        return well and not (self.wrong or self.lost or self.hung or self.left)


@dataclass
class Stage:
    """Where the faults happen."""

    tier: Tier
    house: House
    clients: Clients
    usual: float = 0.0

    def actors(self) -> Mapping[str, tuple[int, str]]:
        """The actors of the victim's node: kind -> (process, beginning of the names of whoever may take its place)."""
        node, app = self.house.alive()[VICTIM], self.tier.cluster.config.serve.name
        replica, row = self.tier.replica_on(node)
        last = len(row["rank_pids"]) - 1
        return {
            "coordinator": (row["pid"], names.coordinator(app, replica)),
            "rank": (row["rank_pids"][last], names.ranks(app, replica, last)),
            "storage": (self.tier.storages()[node]["pid"], names.storage(self.tier.store, node)),
        }


def killed(kind: str) -> Callable[[Stage], Struck]:
    def strike(stage: Stage) -> Struck:
        pid, named = stage.actors()[kind]
        at = time.monotonic()
        kill(pid)
        return Struck(at, at, _first(lambda: stage.tier.ping(named) - {pid}))

    return strike


def frozen(kind: str) -> Callable[[Stage], Struck]:
    """For some seconds. What was replaced meanwhile does not come back."""

    def strike(stage: Stage) -> Struck:
        pid, named = stage.actors()[kind]
        at = time.monotonic()
        kill(pid, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        _go_on(pid)
        mended = time.monotonic()
        return Struck(at, mended, _first(lambda: stage.tier.ping(named)))

    return strike


def node_killed(stage: Stage) -> Struck:
    """With all its processes; a new one with its name and disk joins a second later."""
    at = time.monotonic()
    old = stage.house.alive()[VICTIM]
    stage.house.signal(VICTIM, signal.SIGKILL)
    time.sleep(1.0)
    stage.house.join(VICTIM)
    mended = time.monotonic()
    return Struck(at, mended, _first(lambda: _settled(stage, old)))


def _settled(stage: Stage, old: str) -> bool:
    """Do the replacement's storage, and a coordinator and ranks in the place of the lost ones, answer?"""
    stage.house.rejoin()
    node = stage.house.alive().get(VICTIM)
    if node is None or node == old or not stage.tier.ping(names.storage(stage.tier.store, node)):
        return False
    config = stage.tier.cluster.config
    wanted = {"coordinator": config.serve.replicas, "rank": config.serve.replicas * config.model.tp}
    return all(len(stage.tier.ping(f"{names.PREFIX}:{kind}:")) >= count for kind, count in wanted.items())


def node_frozen(stage: Stage) -> Struck:
    pinged = _all_of(stage)
    at = time.monotonic()
    stage.house.signal(VICTIM, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    stage.house.signal(VICTIM, signal.SIGCONT)
    mended = time.monotonic()
    return Struck(at, mended, _first(pinged))


def storages_parted(stage: Stage) -> Struck:
    """The nodes of both replicas do not reach each other; the head, with Ray's control, reaches both."""
    pinged = _all_of(stage)
    at = time.monotonic()
    with stage.house.parted("b", VICTIM):
        time.sleep(PAUSE_S)
    return Struck(at, time.monotonic(), _first(pinged))


def node_unplugged(stage: Stage) -> Struck:
    pinged = _all_of(stage)
    at = time.monotonic()
    with stage.house.unplugged(VICTIM):
        time.sleep(PAUSE_S)
    return Struck(at, time.monotonic(), _first(pinged))


def _all_of(stage: Stage) -> Callable[[], bool]:
    """Do the storage and the coordinator of the victim's node answer?"""
    wanted = [named for kind, (_, named) in stage.actors().items() if kind != "rank"]
    return lambda: all(stage.tier.ping(named) for named in wanted)


FAULTS: Mapping[str, Callable[[Stage], Struck]] = {
    "kill -9 coordinator": killed("coordinator"),
    "kill -9 rank": killed("rank"),
    "kill -9 storage": killed("storage"),
    "SIGSTOP coordinator": frozen("coordinator"),
    "SIGSTOP rank": frozen("rank"),
    "SIGSTOP storage": frozen("storage"),
    "link cut between two nodes": storages_parted,
    "link of a node cut": node_unplugged,
    "SIGSTOP node": node_frozen,
    "kill -9 node": node_killed,
}
#: Where a client may send again what was not answered: with its node dies the replica that had the request.
RETRYING = ("kill -9 node",)


def run(stage: Stage, name: str) -> Result:
    """One fault, from the running clients to the rest afterwards."""
    stage.clients.resume()
    stage.clients.retrying = name in RETRYING
    before = time.monotonic()
    if _first(lambda: len(stage.clients.since(before)) >= WINDOW, SERVICE_S) is None:
        raise AssertionError(f"before the fault {len(stage.clients.since(before))} requests ended within {SERVICE_S:g} s")
    struck = FAULTS[name](stage)
    replicas = stage.tier.cluster.config.serve.replicas
    since = struck.pinged if struck.pinged is not None else struck.mended

    def well() -> float | None:
        return back(stage.clients.since(since), stage.usual, replicas)

    _first(well, SERVICE_S)
    at = well()
    stage.clients.pause()
    stage.clients.retrying = False
    sent = stage.clients.since(before)
    during = [one for one in sent if one.ended >= struck.at]
    return Result(
        name,
        None if struck.pinged is None else struck.pinged - struck.at,
        None if at is None or struck.pinged is None else at - struck.pinged,
        hit_rate([one for one in during if one.began >= (at if at is not None else since)]),
        stage.usual,
        len(during),
        sum(one.wrong for one in sent),
        sum(bool(one.error) for one in sent),
        sum(one.hung for one in sent),
        sum(one.retries for one in during),
        max((one.seconds for one in during), default=0.0),
        stage.tier.audit(NODES),
        tuple(sorted({one.error for one in sent if one.error})),
    )


def failed(name: str, why: str) -> Result:
    """The row of a fault that could not be run."""
    return Result(name, None, None, 0.0, 0.0, 0, 0, 0, 0, 0, 0.0, "it could not be run", (why,))


@contextmanager
def stage(house: House, tier: Tier) -> Iterator[Stage]:
    """Clients at work on a tier that is warm: what they get then is the usual."""
    with_clients = Stage(tier, house, tier.clients())
    clients = with_clients.clients.start()
    try:
        until, rates = time.monotonic() + SERVICE_S, [0.0, 0.0]
        while len(rates) < 2 + WARM_UP or rates[-1] > rates[-2] + RISING:
            since = time.monotonic()
            _first(lambda since=since: len(clients.since(since)) >= 2 * WINDOW, SERVICE_S)  # type: ignore[misc]
            rates.append(hit_rate([one for one in clients.since(since) if not one.error]))
            if time.monotonic() > until:
                break
        with_clients.usual = max(rates)
        clients.pause()
        yield with_clients
    finally:
        clients.close()


def _go_on(pid: int) -> None:
    try:
        kill(pid, signal.SIGCONT)
    except ProcessLookupError:  # it was replaced
        return


def _first(condition: Callable[[], object], seconds: float = PING_S) -> float | None:
    """When a condition came true, polled; None where it did not."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return time.monotonic()
        time.sleep(0.05)
    return None
