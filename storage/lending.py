"""What all leases of stores have in common."""

from __future__ import annotations

from types import TracebackType

from typing_extensions import Self


class Released:
    """Is released at the end of a ``with``. Base of what is a :class:`~hicache_ray.store.Lent`."""

    def release(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
