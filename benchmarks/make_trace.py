"""Makes a small trace in Mooncake's format: conversations that grow turn by turn under a few system prompts, and prompts seen once.

``python -m benchmarks.make_trace > benchmarks/small_trace.jsonl`` writes the one that the tests and the README use.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

BLOCK = 512


def requests(seed: int = 7, count: int = 300, talks: int = 40, systems: int = 4) -> Iterator[dict[str, object]]:
    """``count`` requests. A talk is chosen anew each time, recent ones more often; every third request comes once and never again."""
    rng = random.Random(seed)
    fresh = iter(range(10**9))
    prefixes = [[next(fresh) for _ in range(rng.randint(2, 6))] for _ in range(systems)]
    history = [list(rng.choice(prefixes)) for _ in range(talks)]
    for i in range(count):
        if i % 3 == 2:
            blocks = [*rng.choice(prefixes), *(next(fresh) for _ in range(rng.randint(4, 16)))]
        else:
            talk = history[min(int(rng.expovariate(0.12)), talks - 1)]
            talk += [next(fresh) for _ in range(rng.randint(1, 3))]
            blocks = list(talk)
        last = rng.randint(1, BLOCK - 1)  # the last block is partial, and so has an identity of its own
        tokens = len(blocks) * BLOCK + last
        yield {"timestamp": i * 250, "input_length": tokens, "output_length": rng.randint(1, 400), "hash_ids": [*blocks, next(fresh)]}


def main() -> None:
    for request in requests():
        print(json.dumps(request))


if __name__ == "__main__":
    main()
