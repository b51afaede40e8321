"""Open the store of a run's folder."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from instar.cluster.layout import RunFolder
from instar.config import RunConfig, SqliteStoreConfig
from instar.errors import StoreOutdated
from instar.store.base import Store
from instar.store.factory import open_store


@asynccontextmanager
async def open_run_store(
    run_dir: Path, *, read_only: bool = False
) -> AsyncGenerator[tuple[RunConfig, Store]]:
    """Yield a run's config and its store. ``read_only`` avoids disturbing a run in progress."""
    folder = RunFolder(run_dir)
    config = folder.read_config()
    try:
        store = open_store(config, read_only=read_only)
    except StoreOutdated:
        if not isinstance(config.store, SqliteStoreConfig):
            raise  # other runs may use the server
        await _migrate_store(folder, config)
        store = open_store(config, read_only=read_only)
    try:
        yield config, store
    finally:
        await store.close()


async def _migrate_store(folder: RunFolder, config: RunConfig) -> None:
    """Migrate the store of an earlier version's run. Raises InstarError if the run is in progress."""
    descriptor = folder.lock("supervisor", timeout=0.0)
    try:
        await open_store(config).close()
    finally:
        os.close(descriptor)
