"""``python -m hicache_ray.integrations.transformers.prepare``: make a model folder ready and print its cache spec as one JSON line.

A process of its own, so that whoever deploys the tier need not import torch.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from hicache_ray.errors import HiCacheError
from hicache_ray.families import spec_from_config
from hicache_ray.integrations.transformers import tp
from hicache_ray.integrations.transformers.models import make_weights, read_config


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("folder", "family", "size", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("seed", "tp", "page-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--make", action="store_true")
    args = parser.parse_args()
    try:
        if args.make:
            make_weights(args.family, args.folder, args.size, args.seed, args.dtype)
        config = read_config(args.folder)
        spec = spec_from_config(config, args.page_size, args.tp, args.dtype)
        tp.check(config, 0, args.tp)
    except HiCacheError as error:
        print(json.dumps({"error": str(error)}))
        return 2
    print(json.dumps({"folder": args.folder, "spec": asdict(spec)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
