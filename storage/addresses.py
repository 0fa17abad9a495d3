"""Callers' buffers as columns of addresses and sizes: what a batch of copies is made of, without an array object per page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicache_ray.errors import StoreError
from hicache_ray.store import Bytes

Ints = npt.NDArray[np.int64]


class Views(NamedTuple):
    """``addresses, sizes``: int64 [n], in bytes. ``owners`` keep the memory where it is for as long as somebody holds them."""

    addresses: Ints
    sizes: Ints
    owners: Sequence[object]


def views_of(buffers: Sequence[Bytes], writable: bool = False) -> Views:
    """Raises StoreError where one is not contiguous, or has to be written and is read-only."""
    try:
        owners = list(map(pa.py_buffer, buffers))  # of all ways to learn an address the cheapest by far: 0.3 us
        for buffer in [buffer for buffer in buffers if getattr(buffer, "ndim", 1) > 1]:
            np.frombuffer(buffer, np.uint8)  # refuses columns first, whose bytes are in another order than they look
    except (TypeError, ValueError, BufferError) as error:
        raise StoreError(f"not one contiguous buffer of bytes: {error}") from error
    sizes = [owner.size for owner in owners]
    if writable and not all(owner.is_mutable or not owner.size for owner in owners):
        raise StoreError("a target is read-only")
    return Views(np.array([owner.address for owner in owners], np.int64), np.array(sizes, np.int64), owners)
