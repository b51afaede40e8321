"""Weaver's SDK against a service that misbehaves."""

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
    WeaverCallPolicy,
    WeaverClient,
    WeaverError,
    build_forward_datum,
    build_training_datum,
    extract_logprobs,
    extract_metrics,
)
from instar.config import LossConfig
from instar.gateway.serve import bind, serve
from instar.types import Sample

KEY = "sk-very-secret"
Answer = Callable[[Request], Awaitable[Response]]


class Script:
    """Answers what it is told to, in turn; then that an operation is done."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.asked: list[str] = []
        self.bodies: list[dict[str, object]] = []
        self.over = asyncio.Event()

    def then(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        async def answer(request: Request) -> Response:
            if isinstance(body, str):
                return Response(body, status, headers, "text/html")
            return JSONResponse(body, status, headers)

        self.answers.append(answer)

    def then_stall(self) -> None:
        async def answer(request: Request) -> Response:
            await self.over.wait()
            return Response()

        self.answers.append(answer)

    async def answer(self, request: Request) -> Response:
        path = request.url.path.removeprefix("/api/v1")
        if path == "/sessions" or path.endswith("/heartbeat"):
            return JSONResponse({"id": "session"})
        if path.endswith("/models"):
            return JSONResponse({"id": "model", "tokenizer_path": "nowhere"})
        self.asked.append(f"{request.method} {path}")
        self.bodies.append(await request.json() if request.method == "POST" else {})
        if self.answers:
            return await self.answers.pop(0)(request)
        return JSONResponse({"id": "op", "status": "done", "response": {"metrics": {"grad_norm": 2.0}}})

    def seq_ids(self) -> list[int]:
        return [body["payload"]["seq_id"] for body in self.bodies if "payload" in body]  # type: ignore[index]


@pytest.fixture
def script() -> Script:
    return Script()


@asynccontextmanager
async def serving(script: Script, deadline: float = 20.0) -> AsyncGenerator[CloudAccess]:
    app = Starlette(routes=[Route("/{path:path}", script.answer, methods=["GET", "POST", "DELETE"])])
    listener, stop = bind("127.0.0.1", 0), asyncio.Event()
    server = asyncio.create_task(serve(app, listener, stop=stop, grace=0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield CloudAccess(url, KEY, "base", deadline)
    finally:
        script.over.set()
        stop.set()
        await server


async def training(access: CloudAccess) -> tuple[WeaverClient, AsyncTrainingClient]:
    service = WeaverClient(access)
    return service, await service.create_model(base_model="base")


async def step(access: CloudAccess, service: WeaverClient, client: AsyncTrainingClient) -> object:
    patience = WeaverCallPolicy(access)

    async def submit() -> object:
        with service.reuse_sequence_id_on_error():
            return await client.optim_step(AdamParams(), wait=False)

    return await patience.await_operation("optim_step", await patience.call("optim_step", submit))  # type: ignore[arg-type]


async def test_retried_call_keeps_its_sequence_id(script: Script) -> None:
    async with serving(script) as access:
        service, client = await training(access)
        script.then(503, {"error": "unavailable", "message": "not now", "retryable": True})
        script.then(429, {"error": "rate_limited", "message": "slowly"}, {"Retry-After": "0.3"})
        began = time.monotonic()
        await step(access, service, client)
        assert time.monotonic() - began > 0.3
        await step(access, service, client)
        await service.aclose()
    assert script.seq_ids() == [1, 1, 1, 2]


async def test_rejected_call_leaves_no_sequence_gap(script: Script) -> None:
    async with serving(script) as access:
        service, client = await training(access)
        script.then(400, {"error": "invalid_request", "message": "bad numbers"})
        with pytest.raises(WeaverError, match="bad numbers") as caught:
            await step(access, service, client)
        assert caught.value.kind == "refused"
        assert extract_metrics(await step(access, service, client)) == {"grad_norm": 2.0}
        await service.aclose()
    assert script.seq_ids() == [1, 1]


async def test_closing_the_client_keeps_models(script: Script) -> None:
    async with serving(script) as access:
        service, _ = await training(access)
        await service.aclose()
        assert script.asked == []
        service, client = await training(access)
        await service.end_training(client.model_id)
        assert script.asked == ["POST /models/model/terminate"]
        await service.aclose()


async def test_stalled_service_raises_at_the_deadline(script: Script) -> None:
    async with serving(script, deadline=0.5) as access:
        service, client = await training(access)
        script.then_stall()
        began = time.monotonic()
        with pytest.raises(WeaverError, match=r"optim_step.*within 0.5 s") as caught:
            await step(access, service, client)
        assert caught.value.kind == "unavailable"
        assert time.monotonic() - began < 2
        script.then(200, {"id": "op", "status": "running"})
        script.then_stall()
        with pytest.raises(WeaverError, match=r"optim_step.*within 0.5 s"):
            await step(access, service, client)
        await service.aclose()


async def test_unreachable_service_is_unavailable(script: Script) -> None:
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    access = CloudAccess(url, KEY, "base", 0.3)
    service = WeaverClient(access)
    with pytest.raises(WeaverError, match="connect") as caught:
        await WeaverCallPolicy(access).call("connect", service.connect)
    assert caught.value.kind == "unavailable"
    await service.aclose()


async def test_errors_do_not_contain_the_key(script: Script) -> None:
    async with serving(script) as access:
        service, client = await training(access)
        script.then(401, {"error": "unauthorized", "message": f"{KEY} is not known"})
        with pytest.raises(WeaverError, match="WEAVER_API_KEY") as caught:
            await step(access, service, client)
        error: BaseException | None = caught.value
        assert caught.value.kind == "settings"
        while error is not None:
            assert KEY not in str(error)
            error = error.__cause__ or error.__context__
        await service.aclose()


async def test_malformed_response_is_retried_then_raised(script: Script) -> None:
    async with serving(script) as access:
        service, client = await training(access)
        script.then(200, "<html>a proxy")
        await step(access, service, client)
        for _ in range(3):
            script.then(200, {"no": "id"})
        with pytest.raises(WeaverError, match="malformed response") as caught:
            await step(access, service, client)
        assert caught.value.kind == "broken"
        await service.aclose()
    assert script.seq_ids() == [1, 1, 2, 2, 2]


async def test_results_are_polled_soon(script: Script) -> None:
    """The SDK's own wait begins with half a second."""
    async with serving(script) as access:
        service, client = await training(access)
        script.then(200, {"id": "op", "status": "pending"})
        script.then(200, {"id": "op", "status": "running"})
        began = time.monotonic()
        await step(access, service, client)
        assert time.monotonic() - began < 0.4
        await service.aclose()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({"status": "error", "error_code": "model_not_found", "error_message": "?"}, "lost"),
        ({"status": "error", "error_code": "internal_error", "retryable": True}, "unavailable"),
        ({"status": "error", "error_code": "invalid_request", "error_message": "no"}, "refused"),
    ],
)
async def test_operation_errors_are_classified(script: Script, answer: dict[str, object], kind: str) -> None:
    async with serving(script) as access:
        service, client = await training(access)
        script.then(200, {"id": "op", **answer})
        with pytest.raises(WeaverError) as caught:
            await step(access, service, client)
        assert caught.value.kind == kind
        script.then(404, {"error": "not_found", "message": "no such model"})
        with pytest.raises(WeaverError, match="no such model") as caught:
            await step(access, service, client)
        assert caught.value.kind == "lost"
        await service.aclose()


# --- samples ------------------------------------------------------------------------------------


def sample() -> Sample:
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
    """A token whose advantage is 0 is trained on all the same."""
    datum = build_training_datum(sample(), LossConfig())
    assert datum.model_input is not None
    assert datum.model_input.to_ints() == [1, 2, 7, 8, 3]
    sent = {name: values.tolist() for name, values in datum.loss_fn_inputs.items()}
    assert sent == {
        "target_tokens": [2, 7, 8, 3, 9],
        "loss_mask": [0, 1, 1, 0, 1],
        "logprobs": [0, -0.5, -1, 0, -2],
        "advantages": [0, 0.25, 0, 0, 0.5],
    }


def test_cross_entropy_datum_has_weights() -> None:
    sent = build_training_datum(sample(), LossConfig(name="cross_entropy")).loss_fn_inputs
    assert sorted(sent) == ["target_tokens", "weights"]
    assert sent["weights"].tolist() == [0, 0.25, 0, 0, 0.5]
    assert sent["weights"].dtype == torch.float32
    assert sent["target_tokens"].dtype == torch.int64


@pytest.mark.parametrize("wrap", [lambda r: r, lambda r: {"result": r}], ids=["direct", "wrapped"])
def test_both_response_shapes_are_parsed(wrap: Callable[[object], object]) -> None:
    data = [build_forward_datum(sample())]
    answer = wrap({"loss_fn_outputs": [{"logprobs": {"data": [-1, -2, -3, -4, -5], "dtype": "float32"}}]})
    assert extract_logprobs(data, answer)[0].tolist() == [-1, -2, -3, -4, -5]
    assert extract_metrics(wrap({"metrics": {"grad_norm": 1, "name": "x"}})) == {"grad_norm": 1.0}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"loss_fn_outputs": []},
        {"loss_fn_outputs": [{}]},
        {"loss_fn_outputs": [{"logprobs": {"data": [-1, -2], "dtype": "float32"}}]},
        {"loss_fn_outputs": [{"logprobs": "five"}]},
    ],
)
def test_mismatched_response_is_rejected(answer: object) -> None:
    with pytest.raises(WeaverError, match="malformed response"):
        extract_logprobs([build_forward_datum(sample())], answer)
