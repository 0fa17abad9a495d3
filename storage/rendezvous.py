"""Which node a prefix group belongs to: rendezvous hashing (highest random weight; Thaler and Ravishankar 1996).

Every node gets a weight that depends on the group and its own name only, and the heaviest is the home. So all clients agree without
talking, and when a node leaves only its own groups move, each to the node that was next. Stable across processes and machines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def weight(group: bytes, node: str) -> bytes:
    """What ``node`` bids for ``group``; compared as bytes."""
    return hashlib.blake2b(node.encode(), digest_size=16, key=group).digest()


def ranked(group: bytes, nodes: Iterable[str]) -> list[str]:
    """The nodes, the heaviest first: the home, then who would be home without it, and so on."""
    return sorted(nodes, key=lambda node: (weight(group, node), node), reverse=True)
