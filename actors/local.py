"""A Ray of our own on this machine: started for one tier, and ended with every process and file that it has made. And what can be told
beforehand of one that is to be joined."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass

import psutil
import ray

from hicache_ray.config import Config
from hicache_ray.errors import ConfigError

#: Logical CPUs that Serve's own actors and ours take beside the ranks.
SPARE_CPUS = 4
OBJECT_STORE_BYTES = 128 << 20
#: Where the niceness of Ray's workers is set.
NICENESS = "RAY_worker_niceness"
#: Longest wait for the answer of a cluster that is to be joined.
REACH_S = 5.0
#: How long the processes of a Ray that has been shut down may take to end by themselves.
END_S = 3.0


def check_ports(config: Config) -> None:
    """Refuse addresses that cannot be bound, before anything starts: Serve would hang, or share the port. Raises :class:`ConfigError`."""
    for section, at in (("serve", config.serve), ("admin", config.admin)):
        try:
            found = socket.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            with socket.socket(found[0], socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(found[4])
                probe.listen(1)
        except OSError as error:
            why = f"is taken; choose another {section}.port"
            if error.errno != errno.EADDRINUSE:
                why = f"cannot be bound ({error.strerror}); choose another {section}.host or {section}.port"
            raise ConfigError(f"{section}.port is {at.port}, and {at.host}:{at.port} {why}") from error


def no_cluster(address: str, why: str) -> ConfigError:
    return ConfigError(f"no Ray cluster can be joined at {address}: {why}; start one with ray start --head, or give another --address")


def check_address(address: str) -> None:
    """Where it names host and port, refuse one at which nobody listens: Ray itself would try for minutes. Raises :class:`ConfigError`."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        raise no_cluster(address, str(error)) from error


@dataclass
class LocalRay:
    """``folder``: Ray's session with its sockets and logs."""

    folder: str = ""

    def start(self, config: Config) -> None:
        """Raises what ray.init raises. Call :meth:`stop` in any case."""
        # Below /tmp whatever TMPDIR says: Ray's sockets need a short path.
        self.folder = tempfile.mkdtemp(prefix="hicache-ray-", dir="/tmp")
        # Logical CPUs: a second replica's placement group must find room whatever the machine has.
        cpus = SPARE_CPUS + (config.serve.replicas + 1) * (config.model.tp + 1)
        ray.init(
            address="local",
            num_cpus=max(cpus, os.cpu_count() or 1),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=self.folder,
            # Ray's default is 15: whatever else computes on this machine would starve the ranks. The environment may say otherwise.
            _system_config={} if NICENESS in os.environ else {"worker_niceness": 0},
        )

    def stop(self) -> None:
        """Returns when all processes are gone; those that do not end by themselves (frozen ones cannot) are killed. Idempotent."""
        if not self.folder:
            return
        processes = self._processes()
        try:
            ray.shutdown()
        finally:
            _, left = psutil.wait_procs(processes, END_S)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, END_S)
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = ""

    def _processes(self) -> list[psutil.Process]:
        """Ray's own processes name its folder; its workers descend from them."""
        found: list[psutil.Process] = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(self.folder in word for word in child.cmdline()):
                    found += [child, *child.children(recursive=True)]
        return found
