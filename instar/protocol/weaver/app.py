"""The app that serves Weaver's protocol."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from instar.protocol.http import KeyStore, json_response
from instar.protocol.operations import OperationScheduler
from instar.protocol.service import TrainingService
from instar.protocol.weaver.http import KEY_HEADER, WeaverRequest, WeaverRoutes, create_router
from instar.protocol.weaver.sampling import WeaverSamplingRoutes
from instar.protocol.weaver.tensors import TRANSPORTS
from instar.protocol.weaver.training import TRAINING_MODE, WeaverTrainingRoutes

logger = logging.getLogger(__name__)
PRICED_RESOURCES = (
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


class WeaverMetricsRequest(msgspec.Struct):
    metrics: list[WeaverMetric]


def create_app(service: TrainingService, operations: OperationScheduler, keys: Iterable[str]) -> Starlette:
    """Create the app. Every route except `/healthz` requires one of the keys."""
    sessions = WeaverSessionRoutes(service, operations)
    training = WeaverTrainingRoutes(service, operations)
    sampling = WeaverSamplingRoutes(service, operations)
    router = create_router(KeyStore(keys, KEY_HEADER), service.limits.max_body)
    router.add("GET", "supported-models", sessions.list_models)
    router.add("GET", "model-catalog", sessions.list_models)
    router.add("POST", "sessions", sessions.create_session)
    router.add("GET", "sessions/{session}", sessions.show_session)
    router.add("POST", "sessions/{session}/heartbeat", sessions.show_session)
    router.add("POST", "sessions/{session}/metrics", sessions.log_metrics)
    router.add("POST", "sessions/{session}/models", training.create)
    router.add("GET", "models/{model}", training.show)
    router.add("POST", "models/{model}/forward-passes", training.forward)
    router.add("POST", "models/{model}/forward-backward-passes", training.forward_backward)
    router.add("POST", "models/{model}/optimizer-steps", training.optim_step)
    router.add("POST", "models/{model}/export-sampler", training.export)
    router.add("GET", "models/{model}/checkpoints", training.list_checkpoints)
    router.add("POST", "models/{model}/checkpoints", training.save)
    router.add("POST", "models/{model}/load", training.load)
    router.add("POST", "models/{model}/terminate", training.terminate)
    router.add("POST", "sessions/{session}/sampling-sessions", sampling.create)
    router.add("GET", "sampling-sessions/{sampling}", sampling.show)
    router.add("DELETE", "sampling-sessions/{sampling}", sampling.delete)
    router.add("POST", "sampling-sessions/{sampling}/samples", sampling.sample)
    router.add("POST", "sampling-sessions/{sampling}/logprobs", sampling.compute_logprobs)
    router.add("GET", "operations/{operation}", sessions.show_operation)

    async def report_health(request: Request) -> Response:
        return json_response({})

    return router.create_app(Route("/healthz", report_health))


class WeaverSessionRoutes(WeaverRoutes):
    async def list_models(self, request: WeaverRequest) -> Response:
        prices = {
            f"{resource}:{TRAINING_MODE}": {"unit": "token", "unit_price_micros": 0}
            for resource in PRICED_RESOURCES
        }
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
        """Return the session and record a heartbeat."""
        self._service.heartbeat(request.path_params["session"], request.owner)
        return json_response(_session_fields(request.path_params["session"]))

    async def log_metrics(self, request: WeaverRequest) -> Response:
        """Write the client's metrics to the server's log."""
        self._service.heartbeat(request.path_params["session"], request.owner)
        for metric in request.parse(WeaverMetricsRequest).metrics:
            logger.info("%s at step %d: %s = %g", metric.model_id, metric.step, metric.name, metric.value)
        return json_response({})

    async def show_operation(self, request: WeaverRequest) -> Response:
        return await self._respond(request.path_params["operation"], request)


def _session_fields(session_id: str) -> dict[str, Any]:
    # Instar's `WeaverClient` reads ``tensor_transports``. The SDK ignores it.
    return {"id": session_id, "tensor_transports": TRANSPORTS}
