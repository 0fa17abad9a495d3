"""``hicache-ray stats`` as a table."""

from __future__ import annotations

import asyncio

from rich.console import Console

from hicache_ray.actors import answers
from hicache_ray.actors.driver import Driver
from hicache_ray.cli_tables import stats_table
from hicache_ray.spec import Tier
from hicache_ray.testing import Stack, full


class NoRanks:
    """Nothing is executed here."""


def test_what_was_evicted_and_missed_soon_after_is_shown() -> None:
    stack = Stack(page=64, pools={"full": full()}, l1=8, l2=8, settings={"storage": False})
    first, others = list(range(1, 258)), [list(range(1000 * n, 1000 * n + 257)) for n in range(1, 5)]
    for tokens in (first, *others):
        stack.put(tokens)
        stack.settle()
    stack.put(first)
    stack.settle()
    regretted = stack.group.ledger.regretted[(Tier.HOST, "full")]
    assert regretted == 4

    async def told() -> dict[str, object]:
        return answers.stats(Driver(stack.cache, NoRanks(), stack.store, stack.tags, stack.group))  # type: ignore[arg-type]

    row = asyncio.run(told())
    console = Console(width=160)
    with console.capture() as shown:
        console.print(stats_table({"requests": row["requests"], "tokens": row["tokens"], "replicas": {"r1": row}, "storage": {}}))
    lines = [line for line in shown.get().splitlines() if "┃" in line or "│" in line]
    head = [cell.strip() for cell in lines[0].split("┃")[1:-1]]
    host = next(cells for line in lines[1:] if (cells := [c.strip() for c in line.split("│")[1:-1]])[1:3] == ["host", "full"])
    assert dict(zip(head, host, strict=True))["regretted"] == str(regretted)
