"""The engine a run's config names."""

from __future__ import annotations

from instar.config import RunConfig
from instar.engines.base import Engine
from instar.registry import resolve


def create_engine(config: RunConfig) -> Engine:
    return resolve("engines", config.engine.type)(config.model, config.engine)
