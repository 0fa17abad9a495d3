"""Start, find and stop the tier on a Ray cluster. Whatever is started here is ended by :meth:`Cluster.stop`."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve

from hicache_ray.actors import names, storage
from hicache_ray.actors.gateway import ASK_S, GatewayActor
from hicache_ray.actors.serve import application
from hicache_ray.actors.setup import Prepared, arena_config, check_capacities, settings_of, spec_from_json, weights_id
from hicache_ray.config import Config
from hicache_ray.config_sources import masked
from hicache_ray.errors import ConfigError, HiCacheError
from hicache_ray.families import canonical_type

PREPARE_S = 300.0
DEPLOY_S = 300.0
#: Logical CPUs that Serve's own actors and ours take beside the ranks.
SPARE_CPUS = 4

Progress = Callable[[str], None]


def quiet(_: str) -> None:
    """Progress that nobody reads."""


def check(config: Config) -> None:
    """Refuse what cannot work before anything starts: the model type, the grid, shared memory. Raises :class:`ConfigError`."""
    canonical_type(config.model.family)
    if config.storage.backend != "none":
        arena_config(config)


def prepare(config: Config, folder: str) -> Prepared:
    """The model folder and its cache spec; makes random weights in ``folder`` where the configuration names no path.

    Runs in a process of its own, so that the caller stays free of torch. Raises :class:`ConfigError` on what does not fit together.
    """
    command = [sys.executable, "-m", "hicache_ray.integrations.transformers.prepare", "--folder", config.model.path or folder]
    command += ["--family", config.model.family, "--size", config.model.size, "--seed", str(config.model.seed)]
    command += ["--dtype", config.model.dtype, "--tp", str(config.model.tp), "--page-size", str(config.cache.page_size)]
    command += [] if config.model.path else ["--make"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PREPARE_S, check=False, env=env)
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise HiCacheError(f"the model could not be prepared: {done.stderr.strip()[-2000:]}") from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    spec = spec_from_json(answer["spec"])
    check_capacities(config, spec)
    settings_of(config).check(spec)
    made = f"{config.model.family}-{config.model.size}-seed{config.model.seed}-{config.model.dtype}"
    return Prepared(answer["folder"], spec, weights_id(answer["folder"]) if config.model.path else made)


@dataclass
class Cluster:
    """A running tier. ``url``: of generation; ``admin_url`` and ``token``: of the admin endpoint."""

    config: Config
    prepared: Prepared
    url: str = ""
    admin_url: str = ""
    token: str = ""
    socket: str = ""
    deployment: Any = None
    owns_ray: bool = False
    storage: Any = None
    gateway: Any = None
    folder: str | None = None
    ray_dir: str | None = None
    _stopped: bool = field(default=False, repr=False)

    def scale(self, replicas: int) -> None:
        """Another number of replicas; those that run stay."""
        self._deploy(replicas)

    def _deploy(self, replicas: int) -> None:
        app = application(self.config, self.prepared, self.socket, replicas, self.deployment)
        serve.run(app, name=self.config.serve.name, route_prefix="/", blocking=False, logging_config={"log_level": "WARNING"})

    def stop(self) -> None:
        """End everything that :func:`start` began, storage included. Idempotent; never raises for what is gone already."""
        if self._stopped:
            return
        self._stopped = True
        gone = (ray.exceptions.RayError, TimeoutError, RuntimeError, ValueError)
        with suppress(*gone):
            serve.delete(self.config.serve.name)
        for actor in (self.gateway, self.storage):
            if actor is not None:
                with suppress(*gone):
                    ray.get(actor.close.remote(), timeout=ASK_S)
                with suppress(*gone):
                    ray.kill(actor)
        if self.owns_ray:
            ray.shutdown()
        for folder in (self.folder, self.ray_dir):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start(config: Config, address: str | None = None, progress: Progress = quiet, deployment: Any = None) -> Cluster:
    """Bring the tier up: Ray (a local one unless ``address`` names a cluster), storage, the deployment, the admin endpoint.

    ``deployment``: a Serve deployment of your own over a subclass of HiCacheDeployment; none: the one with ``POST /generate``.
    Raises :class:`ConfigError` before anything is started, and leaves nothing behind when a later step fails.
    """
    check(config)
    progress("preparing the model")
    folder = tempfile.mkdtemp(prefix="hicache_ray-model-")
    try:
        prepared = prepare(config, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    cluster = Cluster(config, prepared, deployment=deployment, folder=folder)
    try:
        _bring_up(cluster, address, progress)
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _bring_up(cluster: Cluster, address: str | None, progress: Progress) -> None:
    config = cluster.config
    progress("starting Ray")
    _connect(cluster, address)
    if config.storage.backend != "none":
        progress("starting storage")
        cluster.storage = storage.ensure(arena_config(config), ray.get_runtime_context().get_node_id())
        cluster.socket = ray.get(cluster.storage.address.remote(), timeout=ASK_S)["socket"]
    progress(f"starting {config.serve.replicas} replica(s) of {config.model.tp} rank(s)")
    serve.start(http_options={"host": config.serve.host, "port": config.serve.port}, proxy_location="HeadOnly")
    cluster._deploy(config.serve.replicas)
    cluster.url = f"http://{config.serve.host}:{config.serve.port}"
    secret = config.admin.token
    cluster.token = secret.get_secret_value() if secret is not None else secrets.token_urlsafe(24)
    name = names.gateway(config.serve.name)
    cluster.gateway = GatewayActor.options(name=name, namespace=names.NAMESPACE).remote(
        config.serve.name, config.storage.name, masked(config), cluster.token
    )
    port = ray.get(cluster.gateway.serve.remote(config.admin.host, config.admin.port), timeout=DEPLOY_S)
    cluster.admin_url = f"http://{config.admin.host}:{port}"


def _connect(cluster: Cluster, address: str | None) -> None:
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if ray.is_initialized():
        return
    quiet_run: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    if address is not None:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        return
    cpus = SPARE_CPUS + (cluster.config.serve.replicas + 1) * (cluster.config.model.tp + 1)
    # Below /tmp whatever TMPDIR says: Ray's sockets need a short path.
    cluster.ray_dir = tempfile.mkdtemp(prefix="hicache_ray-", dir="/tmp")
    # Logical CPUs: a second replica's placement group must find room whatever the machine has.
    ray.init(
        address="local", num_cpus=max(cpus, os.cpu_count() or 1), object_store_memory=128 << 20, _temp_dir=cluster.ray_dir, **quiet_run
    )
    cluster.owns_ray = True


def find(app: str) -> dict[str, Any]:
    """Living coordinators of an application on the connected cluster, by replica."""
    out = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == names.NAMESPACE and names.is_coordinator(entry["name"], app):
            with suppress(ValueError):
                out[entry["name"].rsplit(":", 1)[-1]] = ray.get_actor(entry["name"], names.NAMESPACE)
    return out
