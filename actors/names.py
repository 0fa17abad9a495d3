"""How our actors are called and found. All live in one Ray namespace; Serve replicas do not, so it is always passed."""

from __future__ import annotations

NAMESPACE = "hicache"
PREFIX = "hicache"


def coordinator(app: str, replica: str) -> str:
    return f"{PREFIX}:coordinator:{app}:{replica}"


def is_coordinator(name: str, app: str) -> bool:
    """Whether an actor coordinates a replica of this application, and not of one whose name begins alike."""
    return name.rpartition(":")[0] == f"{PREFIX}:coordinator:{app}"


def is_any_coordinator(name: str) -> bool:
    return name.startswith(f"{PREFIX}:coordinator:")


def ranks(app: str, replica: str, rank: int) -> str:
    """What the names of all that were, or are, this rank begin with."""
    return f"{PREFIX}:rank:{app}:{replica}:{rank}:"


def replica_of_rank(name: str, app: str) -> str | None:
    """Whose rank an actor is; None where it is no rank of this application."""
    kind, _, rest = name.rpartition(f":rank:{app}:")
    return rest.partition(":")[0] if kind == PREFIX and rest.count(":") == 2 else None


def rank(app: str, replica: str, rank: int, incarnation: int) -> str:
    """A rank keeps its name for as long as it lives; ``incarnation``: of the group, when it was made."""
    return f"{ranks(app, replica, rank)}{incarnation}"


def storage(name: str, node: str) -> str:
    return f"{PREFIX}:storage:{name}:{node}"


def is_storage(actor: str, name: str) -> bool:
    return actor.rpartition(":")[0] == f"{PREFIX}:storage:{name}"


def directory(name: str) -> str:
    return f"{PREFIX}:directory:{name}"


def gateway(app: str) -> str:
    return f"{PREFIX}:gateway:{app}"
