"""Sizes of keys, tags and ids: checked where callers come in."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_ray.errors import StoreError
from hicache_ray.store import KEY_BYTES, TAG_BYTES

ID_BYTES = KEY_BYTES + TAG_BYTES


def require_ids(ids: Sequence[bytes]) -> None:
    """Raises StoreError."""
    _require(ids, ID_BYTES, "id")


def require_keys(keys: Sequence[bytes], tags: Sequence[bytes]) -> None:
    """Raises StoreError."""
    _require(keys, KEY_BYTES, "key")
    _require(tags, TAG_BYTES, "tag")


def _require(values: Sequence[bytes], size: int, what: str) -> None:
    wrong = set(map(len, values)) - {size}
    if wrong:
        raise StoreError(f"a {what} has {size} bytes, not {min(wrong)}")
