"""Tests for the Weaver client against a scripted server, and for the data it sends and receives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from weaver import AsyncTrainingClient
from weaver.types import AdamParams

from instar.clouds.base import CloudAccess
from instar.clouds.weaver import (
    WeaverCaller,
    WeaverClient,
    WeaverError,
    build_forward_datum,
    build_training_datum,
    extract_logprobs,
    extract_metrics,
)
from instar.config import LossConfig
from instar.conformance.cases import LOSS
from instar.gateway.serve import bind, serve
from instar.types import Sample

KEY = "sk-very-secret"
RequestHandler = Callable[[Request], Awaitable[Response]]


class ScriptedServer:
    """A server that returns the added responses in order. After that, every operation is completed."""

    def __init__(self) -> None:
        self.handlers: list[RequestHandler] = []
        self.requests: list[str] = []
        self.bodies: list[dict[str, object]] = []
        self.stopping = asyncio.Event()

    def add_response(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        async def handle(request: Request) -> Response:
            if isinstance(body, str):
                return Response(body, status, headers, "text/html")
            return JSONResponse(body, status, headers)

        self.handlers.append(handle)

    def add_stalled_response(self) -> None:
        async def handle(request: Request) -> Response:
            await self.stopping.wait()
            return Response()

        self.handlers.append(handle)

    async def handle_request(self, request: Request) -> Response:
        path = request.url.path.removeprefix("/api/v1")
        if path == "/sessions" or path.endswith("/heartbeat"):
            return JSONResponse({"id": "session"})
        if path.endswith("/models"):
            return JSONResponse({"id": "model", "tokenizer_path": "missing"})
        self.requests.append(f"{request.method} {path}")
        self.bodies.append(await request.json() if request.method == "POST" else {})
        if self.handlers:
            return await self.handlers.pop(0)(request)
        return JSONResponse({"id": "op", "status": "done", "response": {"metrics": {"grad_norm": 2.0}}})

    def list_sequence_ids(self) -> list[int]:
        return [body["payload"]["seq_id"] for body in self.bodies if "payload" in body]  # type: ignore[index]


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@asynccontextmanager
async def run_server(server: ScriptedServer, call_timeout: float = 20.0) -> AsyncGenerator[CloudAccess]:
    app = Starlette(routes=[Route("/{path:path}", server.handle_request, methods=["GET", "POST", "DELETE"])])
    listener, stop = bind("127.0.0.1", 0), asyncio.Event()
    task = asyncio.create_task(serve(app, listener, stop=stop, grace=0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield CloudAccess(url, KEY, "base", call_timeout)
    finally:
        server.stopping.set()
        stop.set()
        await task


async def create_training_client(access: CloudAccess) -> tuple[WeaverClient, AsyncTrainingClient]:
    weaver_client = WeaverClient(access)
    return weaver_client, await weaver_client.create_model(base_model="base")


async def run_optim_step(
    access: CloudAccess, weaver_client: WeaverClient, training_client: AsyncTrainingClient
) -> object:
    caller = WeaverCaller(access)

    async def submit() -> object:
        with weaver_client.reuse_sequence_id_on_error():
            return await training_client.optim_step(AdamParams(), wait=False)

    return await caller.await_operation("optim_step", await caller.call("optim_step", submit))  # type: ignore[arg-type]


async def test_retried_call_keeps_its_sequence_id(server: ScriptedServer) -> None:
    async with run_server(server) as access:
        weaver_client, training_client = await create_training_client(access)
        server.add_response(503, {"error": "unavailable", "message": "try again later", "retryable": True})
        server.add_response(429, {"error": "rate_limited", "message": "slow down"}, {"Retry-After": "0.3"})
        start = time.monotonic()
        await run_optim_step(access, weaver_client, training_client)
        assert time.monotonic() - start > 0.3
        await run_optim_step(access, weaver_client, training_client)
        await weaver_client.aclose()
    assert server.list_sequence_ids() == [1, 1, 1, 2]


async def test_rejected_call_leaves_no_sequence_gap(server: ScriptedServer) -> None:
    async with run_server(server) as access:
        weaver_client, training_client = await create_training_client(access)
        server.add_response(400, {"error": "invalid_request", "message": "invalid values"})
        with pytest.raises(WeaverError, match="invalid values") as caught:
            await run_optim_step(access, weaver_client, training_client)
        assert caught.value.kind == "refused"
        assert extract_metrics(await run_optim_step(access, weaver_client, training_client)) == {
            "grad_norm": 2.0
        }
        await weaver_client.aclose()
    assert server.list_sequence_ids() == [1, 1]


async def test_closing_the_client_keeps_models_on_the_service(server: ScriptedServer) -> None:
    async with run_server(server) as access:
        weaver_client, _ = await create_training_client(access)
        await weaver_client.aclose()
        assert server.requests == []
        weaver_client, training_client = await create_training_client(access)
        await weaver_client.end_training(training_client.model_id)
        assert server.requests == ["POST /models/model/terminate"]
        await weaver_client.aclose()


async def test_stalled_service_times_out(server: ScriptedServer) -> None:
    async with run_server(server, call_timeout=0.5) as access:
        weaver_client, training_client = await create_training_client(access)
        server.add_stalled_response()
        start = time.monotonic()
        with pytest.raises(WeaverError, match=r"optim_step.*within 0.5 s") as caught:
            await run_optim_step(access, weaver_client, training_client)
        assert caught.value.kind == "unavailable"
        assert time.monotonic() - start < 2
        server.add_response(200, {"id": "op", "status": "running"})
        server.add_stalled_response()
        with pytest.raises(WeaverError, match=r"optim_step.*within 0.5 s"):
            await run_optim_step(access, weaver_client, training_client)
        await weaver_client.aclose()


async def test_unreachable_service_is_unavailable(server: ScriptedServer) -> None:
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    access = CloudAccess(url, KEY, "base", 0.3)
    weaver_client = WeaverClient(access)
    with pytest.raises(WeaverError, match="connect") as caught:
        await WeaverCaller(access).call("connect", weaver_client.connect)
    assert caught.value.kind == "unavailable"
    await weaver_client.aclose()


async def test_errors_do_not_contain_the_key(server: ScriptedServer) -> None:
    async with run_server(server) as access:
        weaver_client, training_client = await create_training_client(access)
        server.add_response(401, {"error": "unauthorized", "message": f"{KEY} is not known"})
        with pytest.raises(WeaverError, match="WEAVER_API_KEY") as caught:
            await run_optim_step(access, weaver_client, training_client)
        error: BaseException | None = caught.value
        assert caught.value.kind == "settings"
        while error is not None:
            assert KEY not in str(error)
            error = error.__cause__ or error.__context__
        await weaver_client.aclose()


async def test_malformed_response_is_retried_then_raised(server: ScriptedServer) -> None:
    async with run_server(server) as access:
        weaver_client, training_client = await create_training_client(access)
        server.add_response(200, "<html>Bad gateway")
        await run_optim_step(access, weaver_client, training_client)
        for _ in range(3):
            server.add_response(200, {"unexpected": "field"})
        with pytest.raises(WeaverError, match="malformed response") as caught:
            await run_optim_step(access, weaver_client, training_client)
        assert caught.value.kind == "broken"
        await weaver_client.aclose()
    assert server.list_sequence_ids() == [1, 1, 2, 2, 2]


async def test_results_are_polled_without_delay(server: ScriptedServer) -> None:
    """The SDK itself would wait half a second before the first poll."""
    async with run_server(server) as access:
        weaver_client, training_client = await create_training_client(access)
        server.add_response(200, {"id": "op", "status": "pending"})
        server.add_response(200, {"id": "op", "status": "running"})
        start = time.monotonic()
        await run_optim_step(access, weaver_client, training_client)
        assert time.monotonic() - start < 0.4
        await weaver_client.aclose()


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        ({"status": "error", "error_code": "model_not_found", "error_message": "?"}, "lost"),
        ({"status": "error", "error_code": "internal_error", "retryable": True}, "unavailable"),
        ({"status": "error", "error_code": "invalid_request", "error_message": "no"}, "refused"),
    ],
)
async def test_operation_errors_are_classified(
    server: ScriptedServer, response: dict[str, object], kind: str
) -> None:
    async with run_server(server) as access:
        weaver_client, training_client = await create_training_client(access)
        server.add_response(200, {"id": "op", **response})
        with pytest.raises(WeaverError) as caught:
            await run_optim_step(access, weaver_client, training_client)
        assert caught.value.kind == kind
        server.add_response(404, {"error": "not_found", "message": "unknown model"})
        with pytest.raises(WeaverError, match="unknown model") as caught:
            await run_optim_step(access, weaver_client, training_client)
        assert caught.value.kind == "lost"
        await weaver_client.aclose()


# --- samples ------------------------------------------------------------------------------------


def make_sample() -> Sample:
    nan = float("nan")
    return Sample(
        "s",
        "s",
        np.array([1, 2, 7, 8, 3, 9], np.int32),
        np.array([0, 0, 1, 1, 0, 0.5], np.float32),
        np.array([nan, nan, -0.5, -1, nan, -2], np.float32),
        np.array([nan, nan, 0.25, 0, nan, 1], np.float32),
        np.array([-1, -1, 4, 4, -1, 4], np.int32),
    )


def test_training_datum_has_the_sample_mask() -> None:
    """Tokens with an advantage of 0 are also trained."""
    datum = build_training_datum(make_sample(), LOSS)
    assert datum.model_input is not None
    assert datum.model_input.to_ints() == [1, 2, 7, 8, 3]
    loss_inputs = {name: values.tolist() for name, values in datum.loss_fn_inputs.items()}
    assert loss_inputs == {
        "target_tokens": [2, 7, 8, 3, 9],
        "loss_mask": [0, 1, 1, 0, 1],
        "logprobs": [0, -0.5, -1, 0, -2],
        "advantages": [0, 0.25, 0, 0, 0.5],
    }


def test_cross_entropy_datum_has_weights() -> None:
    loss_inputs = build_training_datum(make_sample(), LossConfig(name="cross_entropy")).loss_fn_inputs
    assert sorted(loss_inputs) == ["target_tokens", "weights"]
    assert loss_inputs["weights"].tolist() == [0, 0.25, 0, 0, 0.5]
    assert loss_inputs["weights"].dtype == torch.float32
    assert loss_inputs["target_tokens"].dtype == torch.int64


@pytest.mark.parametrize("wrap", [lambda r: r, lambda r: {"result": r}], ids=["direct", "wrapped"])
def test_direct_and_wrapped_responses_are_parsed(wrap: Callable[[object], object]) -> None:
    data = [build_forward_datum(make_sample())]
    response = wrap({"loss_fn_outputs": [{"logprobs": {"data": [-1, -2, -3, -4, -5], "dtype": "float32"}}]})
    assert extract_logprobs(data, response)[0].tolist() == [-1, -2, -3, -4, -5]
    assert extract_metrics(wrap({"metrics": {"grad_norm": 1, "name": "x"}})) == {"grad_norm": 1.0}


@pytest.mark.parametrize(
    "response",
    [
        None,
        {},
        {"loss_fn_outputs": []},
        {"loss_fn_outputs": [{}]},
        {"loss_fn_outputs": [{"logprobs": {"data": [-1, -2], "dtype": "float32"}}]},
        {"loss_fn_outputs": [{"logprobs": "invalid"}]},
    ],
)
def test_response_without_matching_logprobs_is_rejected(response: object) -> None:
    with pytest.raises(WeaverError, match="malformed response"):
        extract_logprobs([build_forward_datum(make_sample())], response)
