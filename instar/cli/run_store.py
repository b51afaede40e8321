"""Open the store of a run's folder."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.store.base import Store
from instar.store.factory import open_store


@asynccontextmanager
async def open_run_store(
    run_dir: Path, *, read_only: bool = False
) -> AsyncGenerator[tuple[RunConfig, Store]]:
    """Yield a run's config and its store. ``read_only`` avoids disturbing a run in progress."""
    config = RunFolder(run_dir).read_config()
    store = open_store(config, read_only=read_only)
    try:
        yield config, store
    finally:
        await store.close()
