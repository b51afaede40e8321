"""Connect to a Ray cluster, or start one on this machine."""

from __future__ import annotations

import asyncio
import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from instar.async_utils import run_in_daemon_thread
from instar.config import RayClusterConfig
from instar.errors import ConfigError, InstarError

LOCAL_CLUSTER = "local"
"""The address that makes Ray start a cluster on this machine."""
REACH_TIMEOUT_SECONDS = 10.0
CONNECT_TIMEOUT_SECONDS = 90.0
FORWARDED_VARIABLES = ("PYTHONPATH",)
"""Variables that Ray's workers need to import Instar. They must not be secret, because Ray displays them."""


def resolve_address(section: RayClusterConfig) -> str:
    return section.address or os.environ.get("RAY_ADDRESS") or LOCAL_CLUSTER


async def connect(address: str) -> Any:
    """Connect to the cluster and return the `ray` module. Raises ConfigError if the package is missing, the
    address is invalid or the cluster cannot be reached, and InstarError if it does not respond in time."""
    if find_spec("ray") is None:
        raise ConfigError("cluster.type: ray requires the package ray; run: pip install 'instar[ray]'")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray reads this variable during the import
    ray: Any = import_module("ray")
    if address.startswith("ray://"):
        raise ConfigError(
            f"cluster.address: {address!r} is a Ray client address, which is not supported; start Instar on "
            "a node in the cluster and set the address to `auto` or host:port"
        )
    await _check_reachable(address)
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
        async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
            # Ray stops the cluster when the thread that started it exits, so the thread is kept.
            await run_in_daemon_thread(lambda: ray.init(**options), keep_thread=True)
    except TimeoutError as error:
        raise InstarError(
            f"cluster.address: the Ray cluster at {address} did not respond within "
            f"{CONNECT_TIMEOUT_SECONDS:g} s; check that it is running"
        ) from error
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cluster.address: cannot connect to the Ray cluster at {address}; check that it is running. "
            f"Ray's error: {error}"
        ) from error
    return ray


async def _check_reachable(address: str) -> None:
    """Raise ConfigError if a host:port address cannot be reached. Ray itself would try for much longer."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        async with asyncio.timeout(REACH_TIMEOUT_SECONDS):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError) as error:
        raise ConfigError(
            f"cluster.address: cannot reach a Ray cluster at {address}; check that it is running"
        ) from error
    writer.close()
