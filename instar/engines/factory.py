"""The engine a run's config names, and the way to engines that run elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from instar.config import CloudEngineConfig, RunConfig
from instar.engines.base import Engine
from instar.engines.pool import EnginePool, Newest
from instar.engines.remote import RemoteEngine
from instar.registry import variant


def create_engine(config: RunConfig) -> Engine:
    if isinstance(config.engine, CloudEngineConfig):
        return variant("samplers", config.backend)(config.model, config.backend, config.engine)
    return variant("engines", config.engine)(config.model, config.engine)


async def connect_engines(
    urls: Sequence[str], token: str | None = None, *, timeout: float = 60.0, newest: Newest | None = None
) -> Engine:
    """What is behind these addresses, as one engine. Waits until one of them answers. ``newest`` is the
    policy that an engine which was away is given when it returns."""
    if len(urls) == 1:
        return await RemoteEngine.connect(urls[0], token, timeout)
    pool = EnginePool([RemoteEngine(url, token) for url in urls], newest=newest)
    try:
        await pool.start(timeout)
    except BaseException:  # cancelled too: nobody else would close it
        await pool.close()
        raise
    return pool
