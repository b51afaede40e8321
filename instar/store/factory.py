"""Opens the store that a run's config selects."""

from __future__ import annotations

from typing import cast

from instar.config import RunConfig
from instar.registry import resolve
from instar.store.base import Store


def open_store(config: RunConfig, *, read_only: bool = False) -> Store:
    """Open the run's store. Unless ``read_only``, create or migrate it first."""
    store_class = resolve("stores", config.store.type)
    return cast(Store, store_class.from_config(config, read_only=read_only))
