"""Serves a model over one of the wire protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from instar.config import ModelConfig
from instar.errors import ConfigError
from instar.gateway.serve import bind, serve
from instar.protocol.base import ServiceLimits
from instar.protocol.operations import LocalOperationScheduler
from instar.registry import load_object

ProtocolName = Literal["tinker", "weaver"]
APPS: dict[ProtocolName, str] = {
    "tinker": "instar.protocol.tinker.app:create_app",
    "weaver": "instar.protocol.weaver.app:create_app",
}
GRACE_SECONDS = 2.0
"""Seconds that requests in flight have to finish after the last operation has stopped."""


async def serve_protocol(
    protocol: str,
    model: ModelConfig,
    *,
    folder: Path,
    keys: Iterable[str],
    host: str = "127.0.0.1",
    port: int = 0,
    base_model: str | None = None,
    limits: ServiceLimits | None = None,
    threads: int | None = None,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve a protocol until ``stop`` is set. ``ready`` is called with the server's address. ``folder``
    contains the checkpoints, including those of an earlier run. ``base_model`` is the model's name for
    clients. Raises ConfigError for an unknown protocol or an address that cannot be bound."""
    create_app = _load_app(protocol)
    try:
        listener = bind(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    try:
        service = await _start_service(model, folder, base_model, limits, threads)
    except BaseException:  # also when cancelled: the socket must not stay open
        listener.close()
        raise
    operations = LocalOperationScheduler(service.limits)
    closed = asyncio.Event()
    app = create_app(service, operations, keys)
    server = asyncio.create_task(serve(app, listener, stop=closed, grace=GRACE_SECONDS))
    try:
        if ready is not None:
            address = f"[{host}]" if ":" in host else host
            ready(f"http://{address}:{listener.getsockname()[1]}")
        await _wait_until_stopped(server, stop or asyncio.Event())
    finally:
        # Ends the requests that wait for a result; they would keep the server open.
        await operations.close()
        closed.set()
        await server
        await service.close()


def _load_app(protocol: str) -> Any:
    if protocol not in APPS:
        raise ConfigError(f"unknown protocol {protocol!r}; supported: {', '.join(APPS)}")
    return load_object(APPS[protocol])


async def _start_service(
    model: ModelConfig,
    folder: Path,
    base_model: str | None,
    limits: ServiceLimits | None,
    threads: int | None,
) -> Any:
    # Imported here because this module imports torch.
    from instar.protocol.service import LocalTrainingService

    service = LocalTrainingService(model, folder, base_model=base_model, limits=limits, threads=threads)
    await service.start()
    return service


async def _wait_until_stopped(server: asyncio.Task[None], stop: asyncio.Event) -> None:
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({server, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
