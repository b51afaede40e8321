"""The engine a run's config names."""

from __future__ import annotations

from instar.config import RunConfig
from instar.engines.base import Engine
from instar.registry import variant


def create_engine(config: RunConfig) -> Engine:
    return variant("engines", config.engine)(config.model, config.engine)
