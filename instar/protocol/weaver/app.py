"""The routes of Weaver's protocol that training and sampling need, under `/api/v1`.

What the service has beside them is not offered: organisations and quotas, managed datasets, weight downloads,
deployments. A request for it is a 404 that says so.
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
from instar.protocol.weaver.http import (
    WeaverHandler,
    WeaverKeyStore,
    WeaverRequest,
    json_response,
    make_endpoint,
    unknown_route,
)
from instar.protocol.weaver.operations import WeaverOperationRoutes
from instar.protocol.weaver.sampling import WeaverSamplingRoutes
from instar.protocol.weaver.tensors import TRANSPORTS
from instar.protocol.weaver.training import MODE, WeaverTrainingRoutes

log = logging.getLogger(__name__)
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
    """Every route but `/healthz` asks for one of the keys; what one key made, another does not find."""
    running = WeaverOperationRoutes(operations)
    sessions = WeaverSessionRoutes(service)
    training = WeaverTrainingRoutes(service, operations, running)
    sampling = WeaverSamplingRoutes(service, running)
    known = WeaverKeyStore(keys)

    def route(method: str, path: str, answer: WeaverHandler) -> Route:
        handle = make_endpoint(answer, known, service.limits.max_body)
        return Route(f"/api/v1{path}", handle, methods=[method])

    return Starlette(
        routes=[
            Route("/healthz", _healthz),
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
            route("GET", "/operations/{operation}", running.show),
        ],
        exception_handlers={HTTPException: unknown_route},
    )


async def _healthz(request: Request) -> Response:
    return json_response({})


class WeaverSessionRoutes:
    """Sessions, and what there is to train."""

    def __init__(self, service: TrainingService) -> None:
        self._service = service

    async def models(self, request: WeaverRequest) -> Response:
        item: dict[str, Any] = {
            "id": self._service.base_model,
            "name": self._service.base_model,
            "status": "available",
            "training_modes": [MODE],
            "prices": {f"{kind}:{MODE}": {"unit": "token", "unit_price_micros": 0} for kind in PRICED},
            "config": {"resource": {"tokenizer": {"path": self._service.tokenizer_path}}},
            "metadata": {"max_context": self._service.max_context},
        }
        return json_response({"items": [item], "pagination": {"total_count": 1, "limit": 100, "offset": 0}})

    async def create_session(self, request: WeaverRequest) -> Response:
        return json_response(_session(await self._service.create_session(request.owner)), 201)

    async def show_session(self, request: WeaverRequest) -> Response:
        """Being asked for keeps a session alive."""
        self._service.heartbeat(request.path_params["session"], request.owner)
        return json_response(_session(request.path_params["session"]))

    async def log_metrics(self, request: WeaverRequest) -> Response:
        """They go to the server's log: there is no other place for them."""
        self._service.heartbeat(request.path_params["session"], request.owner)
        for point in request.parse(WeaverMetrics).metrics:
            log.info("%s at step %d: %s = %g", point.model_id, point.step, point.name, point.value)
        return json_response({})


def _session(session_id: str) -> dict[str, Any]:
    """With what the SDK does not ask for, but a client may want to know."""
    return {"id": session_id, "tensor_transports": TRANSPORTS}
