"""Routes of models: create, train, save, load, export, end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from instar.backends.loss_values import compute_loss
from instar.config import AdamConfig
from instar.protocol.base import (
    AdapterSpec,
    OperationScheduler,
    ProtocolError,
    TrainingModel,
    TrainingService,
)
from instar.protocol.weaver.call_order import WeaverCallOrder
from instar.protocol.weaver.checkpoints import checkpoint_fields, to_service_path, weaver_path
from instar.protocol.weaver.datums import WeaverPassInput, build_outputs, parse_batch
from instar.protocol.weaver.http import WeaverRequest, json_response, parse_json
from instar.protocol.weaver.operations import OperationWork, WeaverOperationRoutes
from instar.protocol.weaver.tensors import TRANSPORTS, TensorPack, unpack_request
from instar.types import new_id

CREATE_DEADLINE = 50.0
"""The SDK gives a request up after 60 s."""
MODE = "lora"
STATE_TYPES = ("weight", "weight_and_optimizer")


class WeaverLora(msgspec.Struct):
    """Defaults are those of the SDK's `LoraConfig`."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class WeaverCreateModel(msgspec.Struct):
    base_model: str
    model_seq_id: int = 0
    lora_config: WeaverLora = msgspec.field(default_factory=WeaverLora)
    training_mode: str = MODE
    training_max_sequence_length: int = 0


class WeaverSequencedPayload(msgspec.Struct):
    seq_id: int
    tensor_transport: str = "default"
    forward_input: msgspec.Raw = msgspec.Raw()
    forward_backward_input: msgspec.Raw = msgspec.Raw()
    adam_params: msgspec.Raw = msgspec.Raw()


class WeaverSequencedRequest(msgspec.Struct):
    payload: WeaverSequencedPayload


class WeaverAdam(msgspec.Struct):
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class WeaverExportSampler(msgspec.Struct):
    seq_id: int
    path: str | None = None
    ttl_seconds: float | None = None


class WeaverSaveState(msgspec.Struct):
    type: str = "weight"
    name: str | None = None
    ttl_seconds: float | None = None


class WeaverLoadState(msgspec.Struct):
    path: str
    include_optimizer: bool = False


class WeaverTerminate(msgspec.Struct):
    instance_types: tuple[str, ...] = ("trainer",)


class WeaverTrainingRoutes:
    def __init__(
        self, service: TrainingService, operations: OperationScheduler, running: WeaverOperationRoutes
    ) -> None:
        self._service = service
        self._operations = operations
        self._running = running
        self._orders: WeakKeyDictionary[TrainingModel, WeaverCallOrder] = WeakKeyDictionary()

    async def create(self, request: WeaverRequest) -> Response:
        given = request.parse(WeaverCreateModel)
        if given.training_mode != MODE:
            raise ProtocolError(f"training_mode {given.training_mode!r} is not offered; only {MODE!r} is")
        if given.training_max_sequence_length > self._service.max_context:
            raise ProtocolError(
                f"training_max_sequence_length {given.training_max_sequence_length} is more than the "
                f"{self._service.max_context} tokens that {self._service.base_model} takes"
            )
        lora = given.lora_config
        adapter = AdapterSpec(lora.rank, lora.seed, lora.train_attn, lora.train_mlp, lora.train_unembed)
        model = await self._running.run(
            "create_model",
            request,
            lambda: self._service.create_model(
                request.path_params["session"], request.owner, given.base_model, adapter
            ),
            key=_creation(request, given),
            deadline=CREATE_DEADLINE,
        )
        return json_response(self._shown(model), 201)

    async def show(self, request: WeaverRequest) -> Response:
        return json_response(self._shown(self._model(request)))

    def _shown(self, model: TrainingModel) -> dict[str, Any]:
        return {
            "id": model.model_id,
            "session_id": model.session_id,
            "base_model": self._service.base_model,
            "tokenizer_path": self._service.tokenizer_path,
            "training_mode": MODE,
            "status": "running",
        }

    async def forward(self, request: WeaverRequest) -> Response:
        async def work(model: TrainingModel, given: WeaverSequencedPayload, pack: TensorPack) -> Any:
            read = parse_json(given.forward_input, WeaverPassInput)
            batch = parse_batch(read, pack, vocab_size=self._service.vocab_size, backward=False)
            logprobs = await model.forward(batch.samples)
            metrics: dict[str, float] = {}
            if batch.loss is not None:
                loss, metrics = compute_loss(batch.loss, batch.samples, logprobs)
                metrics["loss"] = loss
            return {"result": {"loss_fn_outputs": build_outputs(batch, logprobs), "metrics": metrics}}

        return await self._numbered("forward", request, work)

    async def forward_backward(self, request: WeaverRequest) -> Response:
        async def work(model: TrainingModel, given: WeaverSequencedPayload, pack: TensorPack) -> Any:
            read = parse_json(given.forward_backward_input, WeaverPassInput)
            batch = parse_batch(read, pack, vocab_size=self._service.vocab_size, backward=True)
            assert batch.loss is not None
            done = await model.forward_backward(batch.samples, batch.loss)
            metrics = {**done.metrics, "loss": done.loss}
            return {"result": {"loss_fn_outputs": build_outputs(batch, done.logprobs), "metrics": metrics}}

        return await self._numbered("forward_backward", request, work)

    async def optim_step(self, request: WeaverRequest) -> Response:
        async def work(model: TrainingModel, given: WeaverSequencedPayload, pack: TensorPack) -> Any:
            step = await model.optim_step(_adam(parse_json(given.adam_params, WeaverAdam)))
            return {"metrics": {**step.metrics, "grad_norm": step.grad_norm}}

        return await self._numbered("optim_step", request, work)

    async def _numbered(
        self,
        kind: str,
        request: WeaverRequest,
        work: Callable[[TrainingModel, WeaverSequencedPayload, TensorPack], Awaitable[Any]],
    ) -> Response:
        """What is wrong with its content is an error of the operation, not of the request: its sequence id
        is used up either way, and the ones that follow wait for it."""
        model = self._model(request)
        request, pack = unpack_request(request, self._service.limits.max_body)
        given = request.parse(WeaverSequencedRequest).payload
        if given.tensor_transport not in TRANSPORTS:
            raise ProtocolError(
                f"tensor transport {given.tensor_transport!r} is not offered, only {', '.join(TRANSPORTS)}"
            )
        return await self._in_turn(kind, request, model, lambda: work(model, given, pack), given.seq_id)

    async def export(self, request: WeaverRequest) -> Response:
        model, given = self._model(request), request.parse(WeaverExportSampler)

        async def work() -> Any:
            info = await model.export(given.path or new_id("sampler"), ttl=given.ttl_seconds)
            return {**checkpoint_fields(info), "model_path": weaver_path(info)}

        return await self._in_turn("export", request, model, work, given.seq_id)

    async def save(self, request: WeaverRequest) -> Response:
        model, given = self._model(request), request.parse(WeaverSaveState)
        if given.type not in (*STATE_TYPES, "sampling"):
            raise ProtocolError(
                f"checkpoint type {given.type!r} is not one of {', '.join(STATE_TYPES)}, sampling"
            )

        async def work() -> Any:
            name = given.name or new_id("checkpoint")
            if given.type == "sampling":
                return checkpoint_fields(await model.export(name, ttl=given.ttl_seconds))
            with_optimizer = given.type == "weight_and_optimizer"
            return checkpoint_fields(await model.save(name, optimizer=with_optimizer, ttl=given.ttl_seconds))

        return await self._in_turn("save", request, model, work)

    async def load(self, request: WeaverRequest) -> Response:
        model, given = self._model(request), request.parse(WeaverLoadState)

        async def work() -> Any:
            await model.load(to_service_path(given.path), optimizer=given.include_optimizer)
            return {"path": given.path, "include_optimizer": given.include_optimizer}

        return await self._in_turn("load", request, model, work)

    async def _in_turn(
        self,
        kind: str,
        request: WeaverRequest,
        model: TrainingModel,
        work: OperationWork,
        seq: int | None = None,
    ) -> Response:
        def submit(place: int) -> str:
            return self._operations.submit(kind, request.owner, work, queue=model.model_id, seq=place)

        order = self._orders.setdefault(model, WeaverCallOrder())
        if seq is None:
            return await self._running.respond(order.submit_unnumbered(submit), request)
        return await self._running.respond(order.submit_numbered(seq, request.call_id, submit), request)

    async def checkpoints(self, request: WeaverRequest) -> Response:
        """Also those of a model that is over."""
        found = self._service.checkpoints(request.owner, request.path_params["model"])
        if not found:
            self._model(request)
        return json_response({"items": [checkpoint_fields(info) for info in found]})

    async def terminate(self, request: WeaverRequest) -> Response:
        model = self._model(request)
        if "trainer" in request.parse(WeaverTerminate).instance_types:
            await self._service.end_model(model.model_id, request.owner)
            self._operations.close_queue(model.model_id)
        return json_response({"id": model.model_id, "status": "terminated"})

    def _model(self, request: WeaverRequest) -> TrainingModel:
        return self._service.model(request.path_params["model"], request.owner)


def _creation(request: WeaverRequest, given: WeaverCreateModel) -> str | None:
    """The same when a client asks again for the model whose answer it did not get."""
    if request.call_id is None:
        return None
    return f"create_model {request.path_params['session']} {given.model_seq_id} {request.call_id}"


def _adam(given: WeaverAdam) -> AdamConfig:
    """A rate of 0, where a schedule begins or ends, is a step like any other."""
    try:
        adam = AdamConfig(
            lr=given.learning_rate or 1.0,
            beta1=given.beta1,
            beta2=given.beta2,
            eps=given.eps,
            weight_decay=given.weight_decay,
            grad_clip_norm=given.grad_clip_norm,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ProtocolError(f"adam_params: {first['loc'][0]}: {first['msg']}") from None
    return adam if given.learning_rate else adam.model_copy(update={"lr": 0.0})
