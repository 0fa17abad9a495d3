"""A service in a process of its own, which tests may stop, continue and kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

from hicache_ray.storage import ArenaAddress, ArenaConfig, ArenaService, sweep

PATIENCE_S = 30.0


class Process:
    """Starts on construction; ``address`` is known then."""

    def __init__(self, config: ArenaConfig) -> None:
        command = [sys.executable, "-m", "tests.storage.services", json.dumps(asdict(config))]
        self._directory = config.directory
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = ArenaAddress.from_dict(json.loads(self.process.stdout.readline()))

    def freeze(self) -> None:
        """Returns when the process has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)

    def close(self) -> None:
        """A clean end: the service closes when its standard input does. What a killed one left is swept."""
        if self.process.poll() is None:
            self.thaw()
            self.process.communicate(timeout=PATIENCE_S)
        sweep(self._directory)


def main() -> None:
    with ArenaService(ArenaConfig(**json.loads(sys.argv[1]))) as service:
        print(json.dumps(service.address.to_dict()), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
