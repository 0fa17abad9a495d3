"""Sizes of keys, tags and ids: checked where callers come in; and many ids in one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_ray.errors import StoreError
from hicache_ray.store import KEY_BYTES, TAG_BYTES

ID_BYTES = KEY_BYTES + TAG_BYTES
#: Ids of one width: bytes of each, or an (n, width) array of uint8.
Ids: TypeAlias = Sequence[bytes] | npt.NDArray[np.uint8]


def require_ids(ids: Sequence[bytes]) -> None:
    """Raises StoreError."""
    _require(ids, ID_BYTES, "id")


def require_keys(keys: Sequence[bytes], tags: Sequence[bytes]) -> None:
    """Raises StoreError."""
    _require(keys, KEY_BYTES, "key")
    _require(tags, TAG_BYTES, "tag")


def packed(ids: Ids, width: int = ID_BYTES) -> npt.NDArray[np.uint8]:
    """(n, width) uint8. Bytes are copied once, arrays not at all."""
    if isinstance(ids, np.ndarray):
        return np.ascontiguousarray(ids).reshape(-1, width)
    return np.frombuffer(b"".join(ids), np.uint8).reshape(-1, width)


def unpacked(ids: npt.NDArray[np.uint8]) -> list[bytes]:
    """The ids of an (n, width) array as bytes."""
    raw, width = ids.tobytes(), ids.shape[1]
    return [raw[i : i + width] for i in range(0, len(raw), width)]


def _require(values: Sequence[bytes], size: int, what: str) -> None:
    wrong = set(map(len, values)) - {size}
    if wrong:
        raise StoreError(f"a {what} has {size} bytes, not {min(wrong)}")
