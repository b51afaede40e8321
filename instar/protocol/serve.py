"""Serves a model over one of the wire protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from instar.config import ModelConfig
from instar.errors import ConfigError
from instar.gateway.serve import bind, serve
from instar.protocol.base import ServiceLimits
from instar.protocol.operations import OperationScheduler
from instar.registry import load_object

PROTOCOLS = ("tinker", "weaver")
SHUTDOWN_GRACE_SECONDS = 2.0
"""How long in-flight requests may take to finish after all operations have stopped."""


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
    on_ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve a protocol until ``stop`` is set. ``on_ready`` is called with the server's URL. Checkpoints,
    including those of earlier runs, are in ``folder``. ``base_model`` is the model name that clients use.
    Raises ConfigError if the protocol is unknown, or the address, the folder or the model cannot be used."""
    from instar.protocol.service import TrainingService  # imports torch

    if protocol not in PROTOCOLS:
        raise ConfigError(f"unknown protocol {protocol!r}; available: {', '.join(PROTOCOLS)}")
    create_app = load_object(f"instar.protocol.{protocol}.app:create_app")
    service = TrainingService(model, folder, base_model=base_model, limits=limits, threads=threads)
    try:
        listener = bind(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    try:
        await service.start()
    except BaseException:  # also when cancelled: the socket must not stay open
        listener.close()
        raise
    operations = OperationScheduler(service.limits)
    server_stop = asyncio.Event()
    app = create_app(service, operations, keys)
    server = asyncio.create_task(serve(app, listener, stop=server_stop, grace=SHUTDOWN_GRACE_SECONDS))
    stop_wait = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        if on_ready is not None:
            address = f"[{host}]" if ":" in host else host
            on_ready(f"http://{address}:{listener.getsockname()[1]}")
        await asyncio.wait({server, stop_wait}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop_wait.cancel()
        # Close the operations first, because requests waiting for a result would keep the server open.
        await operations.close()
        server_stop.set()
        await server
        await service.close()
