"""Choose the sync route from the backend to the engines: the configured route or, for `auto`, the first
automatic route in `ROUTES` that the backend and the engines support."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from instar.backends.base import Backend
from instar.config import RunConfig
from instar.config.cluster import RayClusterConfig, RouteName
from instar.engines.base import Engine
from instar.errors import ConfigError, EngineError
from instar.models import device_and_dtype
from instar.sync.base import SyncRoute


@dataclass(frozen=True)
class RouteEndpoints:
    config: RunConfig
    backend: Backend
    engines: Sequence[Engine]

    @property
    def can_sync_from_gpu(self) -> bool:
        return self.backend.capabilities.can_sync_live and device_and_dtype(self.config.model)[0] == "cuda"

    @property
    def is_on_ray(self) -> bool:
        return isinstance(self.config.cluster, RayClusterConfig)


async def create_sync_route(config: RunConfig, backend: Backend, engines: Sequence[Engine]) -> SyncRoute:
    """Create the route. Raises ConfigError if it is not usable or, for `auto`, if no route is usable."""
    endpoints = RouteEndpoints(config, backend, engines)
    name = config.sync.route
    if config.trains_on_live:
        if name not in ("auto", "files"):
            raise ConfigError(
                f"sync.route: must be auto or files with data 'live', got {name!r}, because a version is "
                "served only after its promotion, when the trainer no longer has its weights"
            )
        return await _create("files", endpoints)
    if name != "auto":
        try:
            return await _create(name, endpoints)
        except ConfigError as error:
            others = [other for other in ROUTES if other != name and _find_obstacle(other, endpoints) is None]
            raise ConfigError(
                f"sync.route: {name!r} cannot be used: {error}. Available: {', '.join(others) or 'none'}"
            ) from error
    for route in ROUTES:
        if _is_automatic(route, endpoints):
            with contextlib.suppress(ConfigError):
                return await _create(route, endpoints)
    return await _create("files", endpoints)


async def _create(route: RouteName, endpoints: RouteEndpoints) -> SyncRoute:
    if (obstacle := _find_obstacle(route, endpoints)) is not None:
        raise ConfigError(obstacle)
    return await ROUTES[route](endpoints)


def _is_automatic(route: RouteName, endpoints: RouteEndpoints) -> bool:
    """Return True if `sync.route: auto` tries the route before `files`."""
    if route == "ray":
        # Adapter files are small, so they are sent without Ray.
        return endpoints.is_on_ray and "weights" in endpoints.backend.capabilities.artifacts
    return route != "files" and endpoints.can_sync_from_gpu


def _find_obstacle(route: RouteName, endpoints: RouteEndpoints) -> str | None:
    """Return the reason why the backend or an engine does not support the route, or None."""
    capabilities = endpoints.backend.capabilities
    if route != "files" and not capabilities.can_sync_live:
        return f"the {endpoints.config.backend.type} backend cannot export its weights as tensors"
    for engine in endpoints.engines:
        if route == "files" and not capabilities.artifacts.intersection(engine.info.artifacts):
            published, loaded = ", ".join(sorted(capabilities.artifacts)), ", ".join(engine.info.artifacts)
            return f"the backend publishes {published}, but the {engine.info.kind} engine loads only {loaded}"
        if route != "files" and route not in engine.info.routes:
            return f"the {engine.info.kind} engine does not accept weights over {route}"
    if route == "nccl" and not endpoints.can_sync_from_gpu:
        return "the trainer runs on a CPU, but nccl needs a GPU"
    return None


async def _create_ipc(endpoints: RouteEndpoints) -> SyncRoute:
    from instar.sync.shared import SharedSync, get_gpu_uuid, probe_shared_memory

    device = device_and_dtype(endpoints.config.model)[0]
    for index, engine in enumerate(endpoints.engines):
        try:
            probe = await probe_shared_memory(engine)
        except EngineError as error:
            raise ConfigError(f"engine {index} cannot map the trainer's memory: {error}") from error
        if not probe["shared"]:
            raise ConfigError(f"engine {index} cannot map the trainer's memory from a different machine")
        if device == "cuda" and probe["gpus"] != [get_gpu_uuid()]:
            gpus = ", ".join(probe["gpus"]) or "no GPU"
            raise ConfigError(f"engine {index} uses {gpus}, but must use the trainer's {get_gpu_uuid()}")
    return SharedSync(endpoints.backend, device=device, timeout=endpoints.config.sync.deadline)


async def _create_nccl(endpoints: RouteEndpoints) -> SyncRoute:
    from instar.sync.nccl import NcclSync

    if find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed in the trainer's environment; install it there, or change backend.python"
        )
    host = "127.0.0.1"
    if endpoints.is_on_ray:
        import ray

        host = ray.util.get_node_ip_address()
    return NcclSync(endpoints.backend, host=host, timeout=endpoints.config.sync.deadline)


async def _create_ray(endpoints: RouteEndpoints) -> SyncRoute:
    from instar.sync.ray import RaySync

    cluster, settings = endpoints.config.cluster, endpoints.config.sync
    sync = RaySync(
        endpoints.backend,
        address=cluster.address if isinstance(cluster, RayClusterConfig) else None,
        chunk_bytes=settings.chunk_mib * 2**20,
        timeout=settings.deadline,
    )
    await sync.start()
    for index, engine in enumerate(endpoints.engines):
        try:
            await sync.check_engine(engine)
        except EngineError as error:
            await sync.close()
            raise ConfigError(f"engine {index} cannot join the trainer's Ray cluster: {error}") from error
    return sync


async def _create_files(endpoints: RouteEndpoints) -> SyncRoute:
    from instar.sync.files import FileSync

    return FileSync(timeout=endpoints.config.sync.deadline)


ROUTES: dict[RouteName, Callable[[RouteEndpoints], Awaitable[SyncRoute]]] = {
    "ipc": _create_ipc,
    "nccl": _create_nccl,
    "ray": _create_ray,
    "files": _create_files,
}
"""Functions that create a route or raise ConfigError, in the order in which `auto` tries them."""
