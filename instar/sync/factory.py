"""Which way a backend's weights take to the engines: by what the two ends are, or as the config says."""

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
    """What the two ends of a route are."""

    config: RunConfig
    backend: Backend
    engines: Sequence[Engine]

    @property
    def on_gpu(self) -> bool:
        """Whether the trainer's weights are on a GPU."""
        return self.backend.capabilities.live and device_and_dtype(self.config.model)[0] == "cuda"

    @property
    def on_ray(self) -> bool:
        return isinstance(self.config.cluster, RayClusterConfig)

    @property
    def publishes_weights(self) -> bool:
        """Whether a policy is more than an adapter, so that its files would be as large as the model."""
        return "weights" in self.backend.capabilities.artifacts


@dataclass(frozen=True)
class Route:
    find_obstacle: Callable[[RouteEndpoints], str | None]
    """Why the ends cannot take it, as far as they say; None: they can."""
    create: Callable[[RouteEndpoints], Awaitable[Sync]]
    """Raises ConfigError, saying why, where it turns out that they cannot."""
    is_automatic: Callable[[RouteEndpoints], bool]
    """Whether it is tried when nothing is said about the route. The first that can be made is taken."""


async def create_sync(config: RunConfig, backend: Backend, engines: Sequence[Engine]) -> Sync:
    """Raises ConfigError when there is no way, or not the one that the config asks for."""
    ends = RouteEndpoints(config, backend, engines)
    asked = config.sync.route
    if asked != "auto":
        try:
            return await _take(ROUTES[asked], ends)
        except ConfigError as error:
            others = [
                name for name, way in ROUTES.items() if name != asked and way.find_obstacle(ends) is None
            ]
            supported = ", ".join(others) or "none"
            raise ConfigError(f"sync.route: given {asked!r}; {error}. Supported here: {supported}") from error
    for way in ROUTES.values():
        if way.is_automatic(ends):
            try:
                return await _take(way, ends)
            except ConfigError:
                if way is ROUTES["files"]:
                    raise
    raise AssertionError("files are always tried")


async def _take(way: Route, ends: RouteEndpoints) -> Sync:
    if (lack := way.find_obstacle(ends)) is not None:
        raise ConfigError(lack)
    return await way.create(ends)


# --- the ways -----------------------------------------------------------------------------------


async def _ipc(ends: RouteEndpoints) -> Sync:
    from instar.sync.shared import SharedSync, current_gpu_uuid, probe_shared_memory

    device = device_and_dtype(ends.config.model)[0]
    for engine in ends.engines:
        try:
            found = await probe_shared_memory(engine)
        except EngineError as error:
            raise ConfigError(f"an engine cannot map the trainer's memory: {error}") from error
        if not found["shared"]:
            raise ConfigError("an engine does not share the trainer's memory: it is on another machine")
        if device == "cuda" and found["gpus"] != [current_gpu_uuid()]:
            raise ConfigError("an engine is not on the trainer's GPU")
    return SharedSync(ends.backend, device=device, deadline=ends.config.sync.deadline)


async def _nccl(ends: RouteEndpoints) -> Sync:
    from instar.sync.nccl import NcclSync, require_vllm

    require_vllm()
    host = "127.0.0.1"
    if ends.on_ray:
        import ray

        host = ray.util.get_node_ip_address()
    return NcclSync(ends.backend, host=host, deadline=ends.config.sync.deadline)


async def _ray(ends: RouteEndpoints) -> Sync:
    from instar.sync.ray import RaySync

    cluster, settings = ends.config.cluster, ends.config.sync
    sync = RaySync(
        ends.backend,
        address=cluster.address if isinstance(cluster, RayClusterConfig) else None,
        chunk_bytes=settings.chunk_mib * 2**20,
        deadline=settings.deadline,
    )
    await sync.start()
    try:
        for engine in ends.engines:
            await sync.check(engine)
    except EngineError as error:
        await sync.close()
        raise ConfigError(f"an engine cannot join the trainer's Ray cluster: {error}") from error
    return sync


async def _files(ends: RouteEndpoints) -> Sync:
    from instar.sync.files import FileSync

    return FileSync(deadline=ends.config.sync.deadline)


def _no_files(ends: RouteEndpoints) -> str | None:
    try:
        for engine in ends.engines:
            choose_artifact(ends.backend.capabilities.artifacts, engine.info.artifacts)
    except ConfigError as error:
        return str(error)
    return None


def _not_live(route: str) -> Callable[[RouteEndpoints], str | None]:
    def lacks(ends: RouteEndpoints) -> str | None:
        if not ends.backend.capabilities.live:
            return f"the {ends.config.backend.type} backend does not hand out its weights"
        for engine in ends.engines:
            if route not in engine.info.routes:
                return f"the {engine.info.kind} engine does not take weights over {route}"
        if route == "nccl" and not ends.on_gpu:
            return "the trainer computes on a CPU"
        return None

    return lacks


ROUTES: dict[RouteName, Route] = {
    "ipc": Route(_not_live("ipc"), _ipc, is_automatic=lambda ends: ends.on_gpu),
    "nccl": Route(_not_live("nccl"), _nccl, is_automatic=lambda ends: ends.on_gpu),
    "ray": Route(_not_live("ray"), _ray, is_automatic=lambda ends: ends.on_ray and ends.publishes_weights),
    "files": Route(_no_files, _files, is_automatic=lambda ends: True),
}
