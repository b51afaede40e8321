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

from instar.protocol.base import Operations, Workshop
from instar.protocol.weaver.http import Answer, Call, Keys, endpoint, json_response, no_such_route
from instar.protocol.weaver.running import Running
from instar.protocol.weaver.sampling import Sampling
from instar.protocol.weaver.tensors import TRANSPORTS
from instar.protocol.weaver.training import MODE, Training

log = logging.getLogger(__name__)
PRICED = (
    "training_tokens",
    "sampling_prefill_tokens",
    "sampling_cached_prefill_tokens",
    "sampling_output_tokens",
)


class MetricPoint(msgspec.Struct):
    model_id: str
    name: str
    value: float
    step: int


class Metrics(msgspec.Struct):
    metrics: list[MetricPoint]


def create_app(workshop: Workshop, operations: Operations, keys: Iterable[str]) -> Starlette:
    """Every route but `/healthz` asks for one of the keys; what one key made, another does not find."""
    running = Running(operations)
    service = _Service(workshop)
    training = Training(workshop, operations, running)
    sampling = Sampling(workshop, running)
    known = Keys(keys)

    def route(method: str, path: str, answer: Answer) -> Route:
        handle = endpoint(answer, known, workshop.limits.max_body)
        return Route(f"/api/v1{path}", handle, methods=[method])

    return Starlette(
        routes=[
            Route("/healthz", _healthz),
            route("GET", "/supported-models", service.models),
            route("GET", "/model-catalog", service.models),
            route("POST", "/sessions", service.create_session),
            route("GET", "/sessions/{session}", service.show_session),
            route("POST", "/sessions/{session}/heartbeat", service.show_session),
            route("POST", "/sessions/{session}/metrics", service.log_metrics),
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
        exception_handlers={HTTPException: no_such_route},
    )


async def _healthz(request: Request) -> Response:
    return json_response({})


class _Service:
    """Sessions, and what there is to train."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop

    async def models(self, call: Call) -> Response:
        item: dict[str, Any] = {
            "id": self._workshop.base_model,
            "name": self._workshop.base_model,
            "status": "available",
            "training_modes": [MODE],
            "prices": {f"{kind}:{MODE}": {"unit": "token", "unit_price_micros": 0} for kind in PRICED},
            "config": {"resource": {"tokenizer": {"path": self._workshop.tokenizer_path}}},
            "metadata": {"max_context": self._workshop.max_context},
        }
        return json_response({"items": [item], "pagination": {"total_count": 1, "limit": 100, "offset": 0}})

    async def create_session(self, call: Call) -> Response:
        return json_response(_session(await self._workshop.create_session(call.owner)), 201)

    async def show_session(self, call: Call) -> Response:
        """Being asked for keeps a session alive."""
        self._workshop.heartbeat(call.path["session"], call.owner)
        return json_response(_session(call.path["session"]))

    async def log_metrics(self, call: Call) -> Response:
        """They go to the server's log: there is no other place for them."""
        self._workshop.heartbeat(call.path["session"], call.owner)
        for point in call.parse(Metrics).metrics:
            log.info("%s at step %d: %s = %g", point.model_id, point.step, point.name, point.value)
        return json_response({})


def _session(session_id: str) -> dict[str, Any]:
    """With what the SDK does not ask for, but a client may want to know."""
    return {"id": session_id, "tensor_transports": TRANSPORTS}
