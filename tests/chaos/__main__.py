"""``python -m tests.chaos [fault ...]``: real faults on real actors, under 8 clients; prints one table. Needs root and iproute2.

The exit code is 0 where every fault ran and met its goal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Kill, freeze and cut off the parts of a running tier.")
    parser.add_argument("faults", nargs="*", help="parts of the names of the faults to run; all by default")
    parser.add_argument("--tp", type=int, default=2, help="ranks of each replica")
    parser.add_argument("--keep", action="store_true", help="keep the logs of Ray")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hcc-", dir="/tmp"))  # Ray's sockets need a short path
    _enter(folder)
    try:
        return _run(folder, options)
    finally:
        if options.keep:
            print(f"logs: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _enter(folder: Path) -> None:
    """A world of its own for Ray and for what it starts, before anything imports it."""
    from hicache_ray.actors import environment

    home = folder / "home"
    home.mkdir()
    os.environ.update(HOME=str(home), HF_HOME=str(home), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    environment.quiet()


def _run(folder: Path, options: argparse.Namespace) -> int:
    from tests.chaos import faults, table
    from tests.chaos.house import House, able
    from tests.chaos.tier import Tier, begin, left

    if problem := able():
        print(f"make chaos: {problem}", file=sys.stderr)
        return 2
    wanted = [name for name in faults.FAULTS if not options.faults or any(part in name for part in options.faults)]
    if not wanted:
        print(f"no fault is called {' or '.join(options.faults)}; there are: {', '.join(faults.FAULTS)}", file=sys.stderr)
        return 2
    house = House(folder / "ray", cpus=options.tp + 1)
    results, remains, store = [], [], ""
    try:
        _say("building a cluster of three nodes")
        house.build()
        for name in faults.NODES[1:]:
            house.join(name)
        house.up(len(faults.NODES))
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has set one that ends this process at once, and nothing else
        _say("starting the tier")
        with begin(house, options.tp) as cluster:
            store = cluster.config.storage.name
            _say("computing what the answers must be")
            with faults.stage(house, Tier(cluster, house)) as stage:
                for name in wanted:
                    _say(name)
                    try:
                        results.append(faults.run(stage, name))
                    except Exception:  # the table shows what could not be run, and why
                        traceback.print_exc()
                        results.append(faults.failed(name, traceback.format_exc(limit=-1)))
                    _say(f"  {results[-1]}")
        remains = left(house, store, tiers_only=True)
    finally:
        house.tear_down()
        remains += left(house, store)
        table.show(results, remains)  # also of a run that was interrupted
    return int(bool(remains) or not all(result.met for result in results))


def _say(what: str) -> None:
    print(f"{time.strftime('%X')} {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
