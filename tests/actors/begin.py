"""``python -m tests.actors.begin SETTINGS [take-admin-port]``: start a tier and wait for a signal. A process of its own, so that it can be
interrupted. SETTINGS: a JSON object of settings. One line on stdout for every step, ``up`` when it serves; errors of ours as sentences.
SIGUSR1 makes it tell on stderr what all of its threads do."""

from __future__ import annotations

import faulthandler
import json
import signal
import socket
import sys

from hicache_ray.actors import cluster
from hicache_ray.config_sources import load
from hicache_ray.errors import HiCacheError
from hicache_ray.interrupts import Interrupts


def main() -> int:
    config = load(flags=json.loads(sys.argv[1])).config
    taken = socket.socket()
    faulthandler.register(signal.SIGUSR1)

    def progress(text: str) -> None:
        print(text, flush=True)
        if "take-admin-port" in sys.argv and text == "starting storage":  # later than all checks
            taken.bind((config.admin.host, config.admin.port))
            taken.listen()

    try:
        with Interrupts() as interrupts, cluster.start(config, progress=progress, interrupts=interrupts) as running:
            print("up", running.url, running.token, flush=True)
            interrupts.wait()
    except HiCacheError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
