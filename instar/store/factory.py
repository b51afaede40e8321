"""The store that a run's config names."""

from __future__ import annotations

from typing import cast

from instar.config import RunConfig
from instar.registry import resolve
from instar.store.base import Store


def open_store(config: RunConfig, *, read_only: bool = False) -> Store:
    """Open the run's store, making it where there is none. ``read_only`` neither makes nor migrates.

    A variant is a `Store` with a classmethod ``from_config(config, *, read_only)``.
    """
    variant = resolve("stores", config.store.type)
    return cast(Store, variant.from_config(config, read_only=read_only))
