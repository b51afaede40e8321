"""The way into a Ray cluster, or one of our own on this machine."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from instar.config import RayClusterConfig
from instar.errors import ConfigError, InstarError

T = TypeVar("T")
LOCAL_CLUSTER = "local"
"""Stands for a cluster of our own on this machine."""
REACH_SECONDS = 10.0
CONNECT_SECONDS = 90.0
FORWARDED_VARIABLES = ("PYTHONPATH",)
"""Variables that Ray's own workers need to find our code. They are no secrets: Ray shows them."""


def resolve_address(section: RayClusterConfig) -> str:
    return section.address or os.environ.get("RAY_ADDRESS") or LOCAL_CLUSTER


async def connect(address: str) -> Any:
    """The `ray` module, connected. Raises ConfigError where there is no cluster to connect to."""
    if find_spec("ray") is None:
        raise ConfigError("cluster.type: ray needs the package ray; install instar[ray]")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before the import, which reads it
    ray: Any = import_module("ray")
    if address.startswith("ray://"):
        raise ConfigError(
            f"cluster.address: given {address!r}, a Ray client's; start Instar on a node of the cluster, "
            "with `auto` or host:port"
        )
    await _check_answers(address)
    env = {name: os.environ[name] for name in FORWARDED_VARIABLES if os.environ.get(name)}
    options: dict[str, Any] = {
        "address": address,
        "log_to_driver": False,
        "logging_level": "ERROR",
        "runtime_env": {"env_vars": env} if env else None,
    }
    if address == LOCAL_CLUSTER:
        options["include_dashboard"] = False
    try:
        # A cluster that is started here ends with the thread that started it.
        await run_in_thread(lambda: ray.init(**options), CONNECT_SECONDS, keep_thread=True)
    except TimeoutError as error:
        raise InstarError(f"cluster.address: {address} did not answer in {CONNECT_SECONDS:g} s") from error
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cluster.address: cannot connect to {address}: {error}") from error
    return ray


async def _check_answers(address: str) -> None:
    """Ray itself would try for a minute and a half."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        async with asyncio.timeout(REACH_SECONDS):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError) as error:
        raise ConfigError(f"cluster.address: no Ray cluster answers at {address}") from error
    writer.close()


async def run_in_thread(work: Callable[[], T], seconds: float, *, keep_thread: bool = False) -> T:
    """What blocks, off the event loop. After ``seconds`` it is left behind, and does not hold up the end of
    the process. ``stays``: its thread is there as long as the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # pyright: ignore[reportArgumentType] - there is no error, so a result

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 whatever it is, it belongs to the caller
            failed = error
        try:
            loop.call_soon_threadsafe(settle, result, failed)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more
        if keep_thread:
            threading.Event().wait()

    threading.Thread(target=run, daemon=True, name="ray").start()
    return await asyncio.wait_for(done, seconds)
