"""One tree of errors. Each message says what is wrong and what to change."""

from __future__ import annotations


class HiCacheError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigError(HiCacheError):
    """A setting is wrong; the message names it and the legal choices. Raised before anything starts."""


class UnsupportedModel(ConfigError):
    """A model type that the tier refuses, or does not know, with the reason."""


class LayoutBroken(ConfigError):
    """The self-test at start found that pages do not arrive where they should; the message names the axis."""


class CapacityError(HiCacheError):
    """A request can never fit the configured pools."""


class Busy(HiCacheError):
    """Work is in flight and the caller did not allow waiting, or the queue is full."""


class Cancelled(HiCacheError):
    """The request was given up by its caller."""


class GroupLost(HiCacheError):
    """A rank of the cache group died or froze; the group must be started anew. Requests may be resubmitted."""


class EngineError(HiCacheError):
    """The model's forward failed for this request; others are not touched."""


class RequestRefused(EngineError):
    """The engine cannot run what this request asks for."""


class Inconsistent(HiCacheError):
    """An internal invariant does not hold (a bug). Raised by the ``check()`` of a structure."""


class StoreError(HiCacheError):
    """L3 could not do what was asked; the caller treats it as a miss."""


class StoreTimeout(StoreError):
    """L3 did not answer within the deadline."""


class StoreClosed(StoreError):
    """The store, or this handle of it, is closed or gone."""


class StorageDetached(StoreError):
    """L3 was taken away on purpose, so nothing can be done with what it holds until it is given back."""
