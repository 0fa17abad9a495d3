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


class Place(NamedTuple):
    """Memory of a caller: ``size`` bytes at ``address``, for as long as somebody holds ``owner``."""

    address: int
    size: int
    owner: object


def place_of(buffer: Bytes, writable: bool = False) -> Place:
    """:func:`views_of` of one. Raises StoreError."""
    if getattr(buffer, "ndim", 1) > 1:
        views = views_of([buffer], writable)
        return Place(views.addresses.item(0), views.sizes.item(0), views.owners)
    try:
        owner = pa.py_buffer(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise StoreError(f"not one contiguous buffer of bytes: {error}") from error
    size = owner.size
    if writable and size and not owner.is_mutable:
        raise StoreError("a target is read-only")
    return Place(owner.address, size, owner)


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
