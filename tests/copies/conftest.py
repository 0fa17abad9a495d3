"""Fixtures of the tests of copies."""

from tests.on_host import kernel_on_host

__all__ = ["kernel_on_host"]
