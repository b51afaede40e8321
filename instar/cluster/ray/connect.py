"""Connects to a Ray cluster, or starts one on this machine."""

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
"""Address that makes Ray start a cluster on this machine."""
REACH_SECONDS = 10.0
CONNECT_SECONDS = 90.0
FORWARDED_VARIABLES = ("PYTHONPATH",)
"""Variables that Ray's workers need to import Instar. Ray displays them, so they must not be secrets."""


def resolve_address(section: RayClusterConfig) -> str:
    return section.address or os.environ.get("RAY_ADDRESS") or LOCAL_CLUSTER


async def connect(address: str) -> Any:
    """Connect to the cluster and return the `ray` module. Raises ConfigError if there is no cluster."""
    if find_spec("ray") is None:
        raise ConfigError("cluster.type: ray needs the package ray; install instar[ray]")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray reads this variable during the import
    ray: Any = import_module("ray")
    if address.startswith("ray://"):
        raise ConfigError(
            f"cluster.address: given {address!r}, a Ray client address; start Instar on a node of the "
            "cluster and use `auto` or host:port"
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
        # Ray stops a cluster that it started when the thread that started the cluster exits.
        await run_in_thread(lambda: ray.init(**options), CONNECT_SECONDS, keep_thread=True)
    except TimeoutError as error:
        raise InstarError(f"cluster.address: {address} did not answer in {CONNECT_SECONDS:g} s") from error
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cluster.address: cannot connect to {address}: {error}") from error
    return ray


async def _check_answers(address: str) -> None:
    """Raise ConfigError if nothing listens at the address. Ray itself would try for 90 seconds."""
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
    """Return the result of a blocking function. It runs in a daemon thread, which is abandoned after
    ``seconds``. ``keep_thread`` keeps the thread alive as long as the process."""
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
        except BaseException as error:  # noqa: BLE001 - passed to the caller
            failed = error
        try:
            loop.call_soon_threadsafe(settle, result, failed)
        except RuntimeError:
            return  # the loop is closed, so nothing waits for the result
        if keep_thread:
            threading.Event().wait()

    threading.Thread(target=run, daemon=True, name="ray").start()
    return await asyncio.wait_for(done, seconds)
