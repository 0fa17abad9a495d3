"""What leaving a pool costs, in which order the pages of one path go, and the words in which policies are asked and told.

What leaves a pool is decided in two steps. First by what its going costs (:class:`Cost`): what is of no use, then what its owner has no use
for any more, then copies of what a lower tier has (all alike: losing one costs nothing), then inner windows and snapshots, at last branch
points and the last legal length. Among equals by the policy, and within one use of a path by :func:`order`:

* ``full``: the deepest first, so that what stays is reachable from the root;
* windows and chunks: inner ones first, thinned so that the gaps grow with the distance from the end; those of the last length last;
* snapshots: the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_ray.spec import Kind

Entries = npt.NDArray[np.int32]
Usable: TypeAlias = Callable[[Entries], npt.NDArray[np.bool_]]
Longs: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.int8]


class Cost(IntEnum):
    """What it costs to lose a page here, least first. Copies: a lower tier has the same bytes."""

    USELESS = 0
    EXPIRED = 1
    COPY = 2
    INNER = 3
    END = 4


def order(kind: Kind, count: int, run: int = 1) -> npt.NDArray[np.intp]:
    """The order in which ``count`` equally recent pages of one path (root first) should go: indices, first to go first.

    ``run``: how many of them one length needs. Inner windows go a whole run at a time, so that no part of one is left for long.
    """
    if kind is Kind.FULL:
        return np.arange(count)[::-1]
    from_end = np.arange(count)[::-1] // run  # 0 is the last snapshot, or the window of the last length
    # Distance d from the end survives 2**trailing_zeros(d) thinnings: odd distances go first, the last one (0) never.
    zeros = np.where(from_end == 0, 63, np.log2(np.maximum(from_end & -from_end, 1)).astype(np.int64))
    return np.lexsort((np.arange(count), zeros))


@dataclass(frozen=True)
class Worth:
    """What is known of some entries beside that they were used; each field has one value for each of them.

    ``costs``: of :class:`Cost`. ``priority``: higher ones are to stay longer. ``expires``: after that nobody needs them, in seconds.
    """

    costs: Bytes
    priority: Longs
    expires: npt.NDArray[np.float64]

    @classmethod
    def plain(cls, count: int) -> Worth:
        """Without any hint, and all alike."""
        return cls(np.full(count, Cost.END, np.int8), np.zeros(count, np.int64), np.full(count, np.inf))


@dataclass(frozen=True)
class Spared:
    """Entries of one cost whose turn it was and who would stay, behind all others of that cost; each with the ``credits`` that it would
    have left. ``small``: how many the small queue would lose of them and of those who would go after all."""

    cost: Cost
    entries: Entries
    credits: Bytes
    small: int


@dataclass(frozen=True)
class Going:
    """Who would leave, first to go first: the answer to a question, which has changed nothing. Where they do leave,
    :meth:`Lru.learn` is told."""

    entries: Entries
    spared: tuple[Spared, ...] = ()

    def __len__(self) -> int:
        return len(self.entries)


def grown(array: npt.NDArray[Any], top: int, value: float = 0) -> npt.NDArray[Any]:
    """The array with room for index ``top``, at least doubled where it has none."""
    more = max(top + 1 - len(array), len(array))
    return array if top < len(array) else np.concatenate([array, np.full(more, value, dtype=array.dtype)])
