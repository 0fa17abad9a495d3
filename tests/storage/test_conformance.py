"""What every store does, whatever it is made of. The rules are in :mod:`hicache_ray.storage.conformance`, the stores in ``stores.py``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from hicache_ray.storage.conformance import StoreConformance
from hicache_ray.store import Store
from tests.storage.stores import STORES, Subject


@pytest.fixture(scope="module", params=list(STORES))
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    made = STORES[request.param]()
    yield made
    made.close()


class TestStores(StoreConformance):
    @pytest.fixture(autouse=True)
    def of(self, subject: Subject, nothing_left: None) -> None:
        self.abilities, self._make = subject.abilities, subject.make

    def make_store(self, capacity_bytes: int) -> AbstractContextManager[Store]:
        return self._make(capacity_bytes)
