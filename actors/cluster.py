"""Start, find and stop the tier on a Ray cluster. Whatever is started here is ended by :meth:`Cluster.stop`."""

from __future__ import annotations

import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from hicache_ray import machine
from hicache_ray.actors import names, storage
from hicache_ray.actors.gateway import GatewayActor, GatewaySetup
from hicache_ray.actors.local import LocalRay, check_address, check_ports, no_cluster
from hicache_ray.actors.model import read_spec
from hicache_ray.actors.remote import cause, living
from hicache_ray.actors.serve import application
from hicache_ray.actors.setup import Prepared, arena_config, check_capacities, check_disk, fitted, settings_of, weights_id
from hicache_ray.config import Config
from hicache_ray.config_sources import masked
from hicache_ray.errors import ConfigError, HiCacheError
from hicache_ray.families import canonical_type
from hicache_ray.interrupts import LOOK_S, Interrupts

log = logging.getLogger("hicache_ray.actors")

DEPLOY_S = 300.0
#: An actor that does not close itself within this time is killed.
CLOSE_S = 5.0
#: Ray Serve's controller, by which a running Serve is known.
CONTROLLER, SERVE_NAMESPACE = "SERVE_CONTROLLER_ACTOR", "serve"
#: Names of what may belong to nobody for a while must not begin like those of storage, which sweeps what its dead predecessors left.
MODEL_PREFIX = "hicache-model-"

Progress = Callable[[str], None]


def quiet(_: str) -> None:
    """Progress that nobody reads."""


def check(config: Config) -> None:
    """Refuse what cannot work before anything starts: the model type, the grid, shared memory. Raises :class:`ConfigError`."""
    canonical_type(config.model.family)
    if config.storage.backend != "none":
        arena_config(config)
        check_disk(config)


def prepare(config: Config, folder: str) -> Prepared:
    """The model folder and its cache spec; makes random weights in ``folder`` where the configuration names no path.

    Runs in a process of its own, so that the caller stays free of torch. Raises :class:`ConfigError` on what does not fit together.
    """
    made_in, spec = read_spec(config, folder)
    check_capacities(config, spec)
    settings_of(config).check(spec)
    made = f"{config.model.family}-{config.model.size}-seed{config.model.seed}-{config.model.dtype}"
    if config.model.path and not config.namespace.model_id:
        made = weights_id(made_in)
    return Prepared(made_in, spec, made)


@dataclass
class Cluster:
    """A running tier. ``url``: of generation; ``admin_url`` and ``token``: of the admin endpoint; ``socket``: of the node's storage;
    ``interrupts``: what ends a wait."""

    config: Config
    prepared: Prepared
    deployment: Any = None
    url: str = ""
    admin_url: str = ""
    token: str = field(default="", repr=False)
    socket: str = ""
    interrupts: Interrupts = field(default_factory=Interrupts, repr=False)
    _begun: ExitStack = field(default_factory=ExitStack, repr=False)

    def scale(self, replicas: int) -> None:
        """Another number of replicas; those that run stay. Raises :class:`HiCacheError` when they do not come up."""
        self._deploy(replicas)

    def _deploy(self, replicas: int) -> None:
        app, name = application(self.config, self.prepared, replicas, self.deployment), self.config.serve.name
        target = serve.RunTarget(app, name=name, route_prefix="/", logging_config={"log_level": "WARNING"})
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        until = time.monotonic() + DEPLOY_S
        while not _up(found := serve.status().applications.get(name), replicas):
            why = "" if found is None else _told(found)
            if found is not None and found.status == ApplicationStatus.DEPLOY_FAILED:
                raise HiCacheError(f"the deployment failed: {why}")
            if time.monotonic() > until:
                raise HiCacheError(f"the deployment did not come up within {DEPLOY_S:g} s; does the cluster have room for it? {why}")
            self.interrupts.check()
            time.sleep(LOOK_S)
        # The same once more, which changes nothing: it returns when the proxies know the way.
        serve.run(app, name=name, route_prefix="/", blocking=False, logging_config={"log_level": "WARNING"})

    def stop(self) -> None:
        """End everything that :func:`start` began, in reverse order. Idempotent; never raises for what is gone already."""
        self.interrupts.hold()
        self._begun.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start(
    config: Config, address: str | None = None, progress: Progress = quiet, deployment: Any = None, interrupts: Interrupts | None = None
) -> Cluster:
    """Bring the tier up: Ray (a local one unless ``address`` names a cluster), storage, the deployment, the admin endpoint.

    ``deployment``: a Serve deployment of your own over a subclass of HiCacheDeployment; none: the one with ``POST /generate``.
    ``interrupts``: end the start at any point, and are held from its end on; whoever waits then asks them.
    Raises :class:`ConfigError` before anything is started, and leaves nothing behind when a later step fails.
    """
    check(config)
    if address is None and not ray.is_initialized():
        check_ports(config)
    if address is not None:
        check_address(address)
    interrupts = interrupts or Interrupts()
    with ExitStack() as begun:
        with interrupts.raising():
            cluster = _started(config, begun, address, progress, deployment, interrupts)
        # Held by now: what was begun is the cluster's, which ends it, or still ours.
        cluster._begun = begun.pop_all()
    return cluster


def _started(
    config: Config, begun: ExitStack, address: str | None, progress: Progress, deployment: Any, interrupts: Interrupts
) -> Cluster:
    def step(text: str) -> None:
        interrupts.check()
        progress(text)

    step("preparing the model")
    folder = tempfile.mkdtemp(prefix=MODEL_PREFIX)
    begun.callback(shutil.rmtree, folder, ignore_errors=True)
    prepared = prepare(config, folder)
    if address is None and not ray.is_initialized():  # all ranks will be on this machine; of a cluster each replica measures its own node
        config = fitted(config, prepared.spec, machine.memory(), config.model.tp * config.serve.replicas)
        check_capacities(config, prepared.spec)
        prepared = replace(prepared, fitted=True)
    cluster = Cluster(config, prepared, deployment, interrupts=interrupts)
    _bring_up(cluster, begun, address, step)
    return cluster


def _bring_up(cluster: Cluster, begun: ExitStack, address: str | None, progress: Progress) -> None:
    """Whatever is begun registers its end before it begins, so that an interrupt in the middle leaves nothing."""
    config = cluster.config
    progress("starting Ray")
    ours = address is None and not ray.is_initialized()
    if ours and config.storage.backend != "none":
        begun.callback(storage.sweep, config.storage.directory, config.storage.name)  # when all processes are gone
    _connect(config, begun, address)
    cluster.interrupts.install()  # Ray has a handler of its own for SIGTERM, which ends its processes and this one at once
    if config.storage.backend != "none":
        progress("starting storage")
        _start_storage(cluster, begun, ours)
    progress("starting the admin endpoint")
    _start_gateway(cluster, begun)
    progress(f"starting {config.serve.replicas} replica(s) of {config.model.tp} rank(s)")
    _start_serve(config, begun, ours)
    cluster._deploy(config.serve.replicas)
    cluster.url = f"http://{config.serve.host}:{config.serve.port}"


def _connect(config: Config, begun: ExitStack, address: str | None) -> None:
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if ray.is_initialized():
        return
    if address is not None:
        begun.callback(ray.shutdown)  # leaves the cluster; it goes on without us
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            raise no_cluster(address, str(error).partition("\n")[0]) from error
        return
    local = LocalRay()
    begun.callback(local.stop)
    local.start(config)


def _start_storage(cluster: Cluster, begun: ExitStack, ours: bool) -> None:
    """The store belongs to whoever made its directory; replicas make the storage actors of the other nodes."""
    config, store = cluster.config, cluster.config.storage.name
    if not living(lambda name: name == names.directory(store)):
        if not ours:
            begun.callback(storage.sweep, config.storage.directory, store)
        begun.callback(_quietly, storage.end, config)
    if problem := storage.unreachable(config):
        log.warning("%s", problem)
    cluster.socket = storage.ensure(config, ray.get_runtime_context().get_node_id(), cluster.prepared.model_id).socket


def _start_serve(config: Config, begun: ExitStack, ours: bool) -> None:
    if not ours:  # in a Ray of our own Serve and our application end with the rest
        try:
            ray.get_actor(CONTROLLER, SERVE_NAMESPACE)
        except ValueError:
            begun.callback(_quietly, serve.shutdown)
        begun.callback(_quietly, serve.delete, config.serve.name)
    serve.start(http_options={"host": config.serve.host, "port": config.serve.port}, proxy_location="HeadOnly")


def _start_gateway(cluster: Cluster, begun: ExitStack) -> None:
    config, secret = cluster.config, cluster.config.admin.token
    cluster.token = secret.get_secret_value() if secret is not None else secrets.token_urlsafe(24)
    app, at = config.serve.name, config.admin
    setup = GatewaySetup(app, config.storage.name, masked(config), at.host, at.port, cluster.token)
    try:
        here = storage.on(ray.get_runtime_context().get_node_id())  # its address is for this machine, unless told otherwise
        gateway = GatewayActor.options(name=names.gateway(app), namespace=names.NAMESPACE, scheduling_strategy=here).remote(setup)
    except ValueError as error:
        raise ConfigError(f'serve.name is "{app}", and a tier of this name runs on this cluster; choose another name') from error
    begun.callback(_close, gateway)
    asked, until = gateway.port.remote(), time.monotonic() + DEPLOY_S
    while not ray.wait([asked], timeout=LOOK_S)[0] and time.monotonic() < until:
        cluster.interrupts.check()
    try:
        port = ray.get(asked, timeout=0)
    except ray.exceptions.RayTaskError as error:
        raise cause(error) from None
    except TimeoutError:
        raise HiCacheError(f"the admin endpoint did not start within {DEPLOY_S:g} s; does the cluster have room for it?") from None
    cluster.admin_url = f"http://{at.host}:{port}"


def _close(actor: Any) -> None:
    """End an actor, at best by its own hand."""
    _quietly(lambda: ray.get(actor.close.remote(), timeout=CLOSE_S))
    _quietly(lambda: ray.kill(actor))


def _quietly(end: Callable[..., Any], *args: Any) -> None:
    """What is to be ended may be gone, or may not answer; the rest is ended all the same."""
    with suppress(ray.exceptions.RayError, RayServeException, TimeoutError, RuntimeError, ValueError):
        end(*args)


def _up(found: Any, replicas: int) -> bool:
    """Whether an application runs with this many replicas, no more and no less."""
    if found is None or found.status != ApplicationStatus.RUNNING:
        return False
    return all(dict(d.replica_states) == {"RUNNING": replicas} for d in found.deployments.values())


def _told(found: Any) -> str:
    """What Serve says of an application that is not running."""
    return " ".join([found.message, *(d.message for d in found.deployments.values())]).strip()[-2000:]


def find(app: str) -> dict[str, Any]:
    """Living coordinators of an application on the connected cluster, by replica."""
    return {name.rsplit(":", 1)[-1]: actor for name, actor in living(lambda n: names.is_coordinator(n, app)).items()}
