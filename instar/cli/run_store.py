"""The store of a run's folder, for commands that look into it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.store.base import Store
from instar.store.factory import open_store


@asynccontextmanager
async def store_of(run_dir: Path, *, read_only: bool = False) -> AsyncGenerator[tuple[RunConfig, Store]]:
    """The run's config and its store. Read only, a run that is under way does not notice."""
    config = RunFolder(run_dir).read_config()
    store = open_store(config, read_only=read_only)
    try:
        yield config, store
    finally:
        await store.close()
