"""What a request may say for eviction is checked before it goes anywhere."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hicache_ray.actors.serve import MOST_PRIORITY, Generate


def test_hints_are_optional_and_soft() -> None:
    plain = Generate(input_ids=[1])
    assert (plain.priority, plain.ttl_s) == (0, None)
    told = Generate(input_ids=[1], priority=-MOST_PRIORITY, ttl_s=0.5)
    assert (told.priority, told.ttl_s) == (-MOST_PRIORITY, 0.5)


@pytest.mark.parametrize("wrong", [{"priority": MOST_PRIORITY + 1}, {"priority": 1.5}, {"ttl_s": 0}, {"ttl_s": float("inf")}])
def test_hints_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Generate(input_ids=[1], **wrong)
