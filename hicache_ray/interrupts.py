"""SIGINT and SIGTERM as an exception, and on record: Python raises a handler's exception wherever it happens to be, and inside a
destructor, a weak reference's callback or an extension's code that exception is printed and forgotten."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: How often a wait looks at the record. A signal may arrive on a thread of a library, which ends no call of the main thread.
LOOK_S = 0.1


class Interrupts:
    """While it is entered, in the main thread, a signal raises :class:`KeyboardInterrupt` and is recorded (``heard``). Loops that wait call
    :meth:`check`, so that one whose exception was lost ends the program all the same. While something is being ended (:meth:`hold`) signals
    are recorded only: they break no clean-up. One that was never entered hears nothing."""

    def __init__(self) -> None:
        self.heard = False
        self._held = False
        self._before: dict[signal.Signals, Any] | None = None

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        before, self._before = self._before or {}, None
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set from Python

    def install(self) -> None:
        """Once more, where a library has put handlers of its own in the place of ours."""
        for number in self._before or ():
            signal.signal(number, self._hear)

    def _hear(self, _: int, __: FrameType | None) -> None:
        self.heard = True
        if not self._held:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise :class:`KeyboardInterrupt` where a signal has been heard."""
        if self.heard:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """From now on signals are recorded only."""
        self._held = True

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Within it signals raise, one that was heard before as well; whatever ends it, from then on they are held."""
        try:
            self._held = False
            self.check()
            yield
        finally:
            self._held = True

    def wait(self) -> NoReturn:
        """Until a signal; it may have been heard before. Raises :class:`KeyboardInterrupt`."""
        while True:
            self.check()
            time.sleep(LOOK_S)
