"""Select the source of replies for a model name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from instar.config import ModelRoute
from instar.gateway.base import ApiError
from instar.gateway.engine_source import EngineSource
from instar.gateway.pipeline.sample import Source
from instar.gateway.provider_source import ProviderSource


def match_model_route(models: Mapping[str, ModelRoute], name: str) -> ModelRoute | None:
    """Return the first route whose pattern (`fnmatch`) matches the model name, or None."""
    return next((route for pattern, route in models.items() if fnmatchcase(name, pattern)), None)


@dataclass(frozen=True, slots=True)
class ModelRouter:
    engine_source: EngineSource | None
    _provider: ProviderSource | None
    """The source that replies instead of the engine, or None."""
    _upstreams: Mapping[str, ProviderSource]
    _models: Mapping[str, ModelRoute]

    def select(self, model: str, *, needs_engine: bool = False) -> tuple[Source, bool]:
        """Return the model's source, and whether its calls may be trained on. If ``needs_engine`` is True,
        the source is always the engine. Raise ApiError (404) if there is no source."""
        if needs_engine:
            return self.require_engine(), True
        route = match_model_route(self._models, model) if self._models else None
        is_trainable = route is None or route.trainable
        if route is not None and route.upstream:
            return self._upstreams[route.upstream], is_trainable
        default_source = self._provider or self.engine_source
        if default_source is None:
            message = f"No engine or provider serves {model!r}; configure one in 'engine' or 'models'."
            raise ApiError(404, message, code="model_not_found", param="model")
        return default_source, is_trainable

    def require_engine(self) -> EngineSource:
        if self.engine_source is None:
            message = "This endpoint requires an engine, but none is configured."
            raise ApiError(404, message, code="model_not_found", param="model")
        return self.engine_source
