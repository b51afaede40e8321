"""Chooses the route that weights take from a backend to the engines: the configured one, or the best one that
is possible."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from instar.backends.base import Backend
from instar.config import RunConfig
from instar.config.cluster import RayClusterConfig, RouteName
from instar.engines.base import Engine
from instar.errors import ConfigError, EngineError
from instar.models import device_and_dtype
from instar.sync.base import Sync, choose_artifact


@dataclass(frozen=True)
class RouteEndpoints:
    config: RunConfig
    backend: Backend
    engines: Sequence[Engine]

    @property
    def on_gpu(self) -> bool:
        """Return True if the trainer's weights are on a GPU."""
        return self.backend.capabilities.live and device_and_dtype(self.config.model)[0] == "cuda"

    @property
    def on_ray(self) -> bool:
        return isinstance(self.config.cluster, RayClusterConfig)

    @property
    def publishes_weights(self) -> bool:
        """Return True if a policy consists of full weights, so that its files would be as large as the
        model."""
        return "weights" in self.backend.capabilities.artifacts


@dataclass(frozen=True)
class Route:
    find_obstacle: Callable[[RouteEndpoints], str | None]
    """Returns why the endpoints do not support the route, judging by their configuration; None if they may
    support it."""
    create: Callable[[RouteEndpoints], Awaitable[Sync]]
    """Creates the route. Raises ConfigError if the endpoints turn out not to support it."""
    is_automatic: Callable[[RouteEndpoints], bool]
    """Returns True if `sync.route: auto` tries this route. It uses the first one that works."""


async def create_sync(config: RunConfig, backend: Backend, engines: Sequence[Engine]) -> Sync:
    """Return the route to use. Raises ConfigError if the configured route is not possible, or no route is."""
    endpoints = RouteEndpoints(config, backend, engines)
    name = config.sync.route
    if name != "auto":
        try:
            return await _create(ROUTES[name], endpoints)
        except ConfigError as error:
            others = [
                other
                for other, route in ROUTES.items()
                if other != name and route.find_obstacle(endpoints) is None
            ]
            supported = ", ".join(others) or "none"
            raise ConfigError(f"sync.route: given {name!r}; {error}. Supported here: {supported}") from error
    for route in ROUTES.values():
        if route.is_automatic(endpoints):
            try:
                return await _create(route, endpoints)
            except ConfigError:
                if route is ROUTES["files"]:
                    raise
    raise AssertionError("the route files is always tried")


async def _create(route: Route, endpoints: RouteEndpoints) -> Sync:
    if (obstacle := route.find_obstacle(endpoints)) is not None:
        raise ConfigError(obstacle)
    return await route.create(endpoints)


# --- the routes ---------------------------------------------------------------------------------


async def _ipc(endpoints: RouteEndpoints) -> Sync:
    from instar.sync.shared import SharedSync, current_gpu_uuid, probe_shared_memory

    device = device_and_dtype(endpoints.config.model)[0]
    for engine in endpoints.engines:
        try:
            memory = await probe_shared_memory(engine)
        except EngineError as error:
            raise ConfigError(f"an engine cannot map the trainer's memory: {error}") from error
        if not memory["shared"]:
            raise ConfigError("an engine does not share the trainer's memory: it is on another machine")
        if device == "cuda" and memory["gpus"] != [current_gpu_uuid()]:
            raise ConfigError("an engine is not on the trainer's GPU")
    return SharedSync(endpoints.backend, device=device, deadline=endpoints.config.sync.deadline)


async def _nccl(endpoints: RouteEndpoints) -> Sync:
    from instar.sync.nccl import NcclSync, require_vllm

    require_vllm()
    host = "127.0.0.1"
    if endpoints.on_ray:
        import ray

        host = ray.util.get_node_ip_address()
    return NcclSync(endpoints.backend, host=host, deadline=endpoints.config.sync.deadline)


async def _ray(endpoints: RouteEndpoints) -> Sync:
    from instar.sync.ray import RaySync

    cluster, settings = endpoints.config.cluster, endpoints.config.sync
    sync = RaySync(
        endpoints.backend,
        address=cluster.address if isinstance(cluster, RayClusterConfig) else None,
        chunk_bytes=settings.chunk_mib * 2**20,
        deadline=settings.deadline,
    )
    await sync.start()
    try:
        for engine in endpoints.engines:
            await sync.check(engine)
    except EngineError as error:
        await sync.close()
        raise ConfigError(f"an engine cannot join the trainer's Ray cluster: {error}") from error
    return sync


async def _files(endpoints: RouteEndpoints) -> Sync:
    from instar.sync.files import FileSync

    return FileSync(deadline=endpoints.config.sync.deadline)


def _find_file_obstacle(endpoints: RouteEndpoints) -> str | None:
    try:
        for engine in endpoints.engines:
            choose_artifact(endpoints.backend.capabilities.artifacts, engine.info.artifacts)
    except ConfigError as error:
        return str(error)
    return None


def _find_live_obstacle(route: str) -> Callable[[RouteEndpoints], str | None]:
    def find_obstacle(endpoints: RouteEndpoints) -> str | None:
        if not endpoints.backend.capabilities.live:
            return f"the {endpoints.config.backend.type} backend does not provide its weights"
        for engine in endpoints.engines:
            if route not in engine.info.routes:
                return f"the {engine.info.kind} engine does not accept weights over {route}"
        if route == "nccl" and not endpoints.on_gpu:
            return "the trainer computes on a CPU"
        return None

    return find_obstacle


ROUTES: dict[RouteName, Route] = {
    "ipc": Route(_find_live_obstacle("ipc"), _ipc, is_automatic=lambda endpoints: endpoints.on_gpu),
    "nccl": Route(_find_live_obstacle("nccl"), _nccl, is_automatic=lambda endpoints: endpoints.on_gpu),
    "ray": Route(
        _find_live_obstacle("ray"),
        _ray,
        is_automatic=lambda endpoints: endpoints.on_ray and endpoints.publishes_weights,
    ),
    "files": Route(_find_file_obstacle, _files, is_automatic=lambda endpoints: True),
}
