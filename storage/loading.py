"""Loads compiled loops in the background: until they are there, and where they cannot be had, callers do without.

So a process that never moves bytes (a coordinator) does not load a compiler, and the first who does not wait for one.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from typing import Any

from hicache_ray.storage.threads import begin

log = logging.getLogger("hicache_ray.storage")
KERNELS = ("auto", "off")
_LOAD_S = 60.0


class Loader:
    """``module`` has everything once it has ``last``. ``without``: what to say in the log where it cannot be had. ``off``: never load."""

    def __init__(self, module: str, last: str, without: str, off: bool) -> None:
        self._name, self._last, self._without, self._off = module, last, without, off
        self._lock = threading.Lock()
        self._module: Any = None
        self._thread: threading.Thread | None = None

    def get(self) -> Any | None:
        """The module, or None as long as it is not there; never waits."""
        if not self._off and self._module is None:
            self._begin()
        return self._module

    def warm_up(self, timeout_s: float) -> bool:
        """Load it; True once it is there."""
        if self.get() is None and self._thread is not None:
            self._thread.join(timeout_s)
        return self._module is not None

    def close(self) -> None:
        """No thread of ours is left: a compilation that is under way is waited for, a few seconds."""
        if self._thread is not None:
            self._thread.join(_LOAD_S)

    def _begin(self) -> None:
        with self._lock:
            loaded = sys.modules.get(self._name)
            if hasattr(loaded, self._last):  # not while another thread still imports it
                self._module = loaded
            elif self._thread is None:
                thread = threading.Thread(target=self._load, name="hicache-kernel")
                self._thread = thread if begin(thread) else None  # else the next caller tries again

    def _load(self) -> None:
        try:
            self._module = importlib.import_module(self._name)
        except Exception as error:  # whatever a compiler may raise on some machine: everything works without it
            self._off = True
            log.warning("%s: %s cannot be had: %s", self._without, self._name, error)
