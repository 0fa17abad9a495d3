"""The model folder and the cache spec of a configuration, found out in a process of its own, so that the caller stays free of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from hicache_ray.actors.setup import spec_from_json
from hicache_ray.config import Config
from hicache_ray.errors import ConfigError, HiCacheError
from hicache_ray.spec import CacheSpec

PREPARE_S = 300.0


def read_spec(config: Config, folder: str) -> tuple[str, CacheSpec]:
    """The model's folder and the spec of one of its ranks; random weights are made in ``folder`` where the configuration names no path.

    Raises :class:`ConfigError` on what does not fit together.
    """
    command = [sys.executable, "-m", "hicache_ray.integrations.transformers.prepare", "--folder", config.model.path or folder]
    command += ["--family", config.model.family, "--size", config.model.size, "--seed", str(config.model.seed)]
    command += ["--dtype", config.model.dtype, "--tp", str(config.model.tp), "--page-size", str(config.cache.page_size)]
    command += [] if config.model.path else ["--make"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PREPARE_S, check=False, env=env)
    except subprocess.TimeoutExpired:
        where = config.model.path or folder
        raise HiCacheError(f"the model could not be prepared within {PREPARE_S:g} s; is the disk of {where} slow?") from None
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise HiCacheError(f"the model could not be prepared: {done.stderr.strip()[-2000:]}") from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["folder"], spec_from_json(answer["spec"])
