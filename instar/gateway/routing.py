"""What answers when an agent asks for a model by some name."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from instar.config import ModelRoute
from instar.gateway.base import ApiError
from instar.gateway.calls import Calls
from instar.gateway.dialects.base import ModelRequest
from instar.gateway.upstream.base import Upstream


def match_model_route(models: Mapping[str, ModelRoute], name: str) -> ModelRoute | None:
    """The first whose pattern fits."""
    return next((route for pattern, route in models.items() if fnmatchcase(name, pattern)), None)


class ModelRouter:
    def __init__(
        self,
        calls: Calls | None,
        upstream: Upstream | None,
        upstreams: Mapping[str, Upstream],
        models: Mapping[str, ModelRoute],
    ) -> None:
        self.calls = calls
        self._upstream = upstream
        self._upstreams = upstreams
        self._models = models

    def of(self, model: str) -> tuple[Upstream | None, bool]:
        """The upstream, or None for the engine; and whether its calls may be trained on."""
        if (route := match_model_route(self._models, model)) is None:
            return self._upstream, True
        return self._upstreams[route.upstream] if route.upstream else self._upstream, route.trainable

    def engine(self, request: ModelRequest | None = None) -> Calls:
        """Raises ApiError where there is none, or where the request asks for what it cannot give."""
        if request is not None and request.unsupported_error is not None:
            raise request.unsupported_error
        if self.calls is None:
            raise ApiError(
                404, "This gateway has no model of its own.", code="model_not_found", param="model"
            )
        return self.calls
