"""The app that serves the training and sampling routes of Weaver's protocol, under `/api/v1`.

Organisations and quotas, managed datasets, weight downloads and deployments are not offered; a request for
them gets a 404 that says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from instar.protocol.base import OperationScheduler, TrainingService
from instar.protocol.http import KeyStore, json_response
from instar.protocol.weaver.http import KEY_HEADER, WeaverHandler, WeaverRequest, make_endpoint, unknown_route
from instar.protocol.weaver.operations import WeaverOperationRoutes
from instar.protocol.weaver.sampling import WeaverSamplingRoutes
from instar.protocol.weaver.tensors import TRANSPORTS
from instar.protocol.weaver.training import TRAINING_MODE, WeaverTrainingRoutes

logger = logging.getLogger(__name__)
PRICED = (
    "training_tokens",
    "sampling_prefill_tokens",
    "sampling_cached_prefill_tokens",
    "sampling_output_tokens",
)


class WeaverMetric(msgspec.Struct):
    model_id: str
    name: str
    value: float
    step: int


class WeaverMetrics(msgspec.Struct):
    metrics: list[WeaverMetric]


def create_app(service: TrainingService, operations: OperationScheduler, keys: Iterable[str]) -> Starlette:
    """Return the app. Every route except `/healthz` requires one of the keys. Clients with different keys
    cannot see each other's sessions and models."""
    operation_routes = WeaverOperationRoutes(operations)
    sessions = WeaverSessionRoutes(service)
    training = WeaverTrainingRoutes(service, operations, operation_routes)
    sampling = WeaverSamplingRoutes(service, operation_routes)
    key_store = KeyStore(keys, KEY_HEADER)

    def route(method: str, path: str, handler: WeaverHandler) -> Route:
        endpoint = make_endpoint(handler, key_store, service.limits.max_body)
        return Route(f"/api/v1{path}", endpoint, methods=[method])

    return Starlette(
        routes=[
            Route("/healthz", _health),
            route("GET", "/supported-models", sessions.models),
            route("GET", "/model-catalog", sessions.models),
            route("POST", "/sessions", sessions.create_session),
            route("GET", "/sessions/{session}", sessions.show_session),
            route("POST", "/sessions/{session}/heartbeat", sessions.show_session),
            route("POST", "/sessions/{session}/metrics", sessions.log_metrics),
            route("POST", "/sessions/{session}/models", training.create),
            route("GET", "/models/{model}", training.show),
            route("POST", "/models/{model}/forward-passes", training.forward),
            route("POST", "/models/{model}/forward-backward-passes", training.forward_backward),
            route("POST", "/models/{model}/optimizer-steps", training.optim_step),
            route("POST", "/models/{model}/export-sampler", training.export),
            route("GET", "/models/{model}/checkpoints", training.checkpoints),
            route("POST", "/models/{model}/checkpoints", training.save),
            route("POST", "/models/{model}/load", training.load),
            route("POST", "/models/{model}/terminate", training.terminate),
            route("POST", "/sessions/{session}/sampling-sessions", sampling.create),
            route("GET", "/sampling-sessions/{sampling}", sampling.show),
            route("DELETE", "/sampling-sessions/{sampling}", sampling.delete),
            route("POST", "/sampling-sessions/{sampling}/samples", sampling.sample),
            route("POST", "/sampling-sessions/{sampling}/logprobs", sampling.logprobs),
            route("GET", "/operations/{operation}", operation_routes.show),
        ],
        exception_handlers={HTTPException: unknown_route},
    )


async def _health(request: Request) -> Response:
    return json_response({})


class WeaverSessionRoutes:
    """The routes for sessions and the list of base models."""

    def __init__(self, service: TrainingService) -> None:
        self._service = service

    async def models(self, request: WeaverRequest) -> Response:
        prices = {f"{kind}:{TRAINING_MODE}": {"unit": "token", "unit_price_micros": 0} for kind in PRICED}
        item: dict[str, Any] = {
            "id": self._service.base_model,
            "name": self._service.base_model,
            "status": "available",
            "training_modes": [TRAINING_MODE],
            "prices": prices,
            "config": {"resource": {"tokenizer": {"path": self._service.tokenizer_path}}},
            "metadata": {"max_context": self._service.max_context},
        }
        return json_response({"items": [item], "pagination": {"total_count": 1, "limit": 100, "offset": 0}})

    async def create_session(self, request: WeaverRequest) -> Response:
        return json_response(_session_fields(await self._service.create_session(request.owner)), 201)

    async def show_session(self, request: WeaverRequest) -> Response:
        """Return the session; the request also counts as a heartbeat."""
        self._service.heartbeat(request.path_params["session"], request.owner)
        return json_response(_session_fields(request.path_params["session"]))

    async def log_metrics(self, request: WeaverRequest) -> Response:
        """Write the client's metrics to the server's log."""
        self._service.heartbeat(request.path_params["session"], request.owner)
        for metric in request.parse(WeaverMetrics).metrics:
            logger.info("%s at step %d: %s = %g", metric.model_id, metric.step, metric.name, metric.value)
        return json_response({})


def _session_fields(session_id: str) -> dict[str, Any]:
    """Return a session's fields. ``tensor_transports`` is read by `WeaverClient`, not by the SDK."""
    return {"id": session_id, "tensor_transports": TRANSPORTS}
