"""Put the tier under a Serve deployment of your own: a front that takes text and answers text.

    .venv/bin/python examples/own_deployment.py

A subclass of HiCacheDeployment is a Serve replica that owns a cache group: `await self.generate(...)` is all a front needs. What belongs to
your model (here: a tokenizer that maps bytes to ids) stays in your class.
"""

from hicache_ray.actors import environment

environment.own_token()  # before Ray is imported

import httpx  # noqa: E402
from ray import serve  # noqa: E402
from starlette.requests import Request  # noqa: E402

from hicache_ray.actors import cluster  # noqa: E402
from hicache_ray.actors.serve import Generate, HiCacheDeployment  # noqa: E402
from hicache_ray.config_sources import load  # noqa: E402

FIRST = 3  # ids 0 to 2 are special


@serve.deployment
class Complete(HiCacheDeployment):
    """``POST /`` with ``{"text": ...}``."""

    async def __call__(self, request: Request) -> dict:
        text = (await request.json())["text"]
        body = Generate(input_ids=[FIRST + byte for byte in text.encode()], max_new_tokens=8)
        answer = await self.generate(body)
        return {"ids": answer["output_ids"], "cached": answer["cached_tokens"], "computed": answer["computed_tokens"]}


def main() -> None:
    config = load(flags={"model.family": "qwen3_5", "model.size": "tiny", "storage.size": "64MiB"}).config
    question = "The same long preamble, again and again. " * 20
    with cluster.start(config, progress=print, deployment=Complete) as running:
        for ending in ("What is cached?", "What is computed?"):
            print(httpx.post(running.url, json={"text": question + ending}, timeout=60).json())


if __name__ == "__main__":
    main()
