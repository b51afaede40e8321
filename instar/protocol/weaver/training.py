"""The routes for models: create, train, save, load, export and terminate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from starlette.responses import Response

from instar.backends.loss_values import compute_loss
from instar.protocol.base import OperationScheduler, ProtocolError, TrainingModel, TrainingService
from instar.protocol.http import json_response, parse_json
from instar.protocol.weaver.call_order import WeaverCallOrder
from instar.protocol.weaver.checkpoints import checkpoint_fields, to_service_path, weaver_path
from instar.protocol.weaver.datums import WeaverPassInput, build_outputs, parse_batch
from instar.protocol.weaver.http import WeaverRequest
from instar.protocol.weaver.operations import OperationWork, WeaverOperationRoutes
from instar.protocol.weaver.tensors import TRANSPORTS, TensorPack, unpack_request
from instar.protocol.wire import AdamFields, LoraFields
from instar.types import new_id

CREATE_DEADLINE = 50.0
"""Seconds to create a model. The SDK gives up a request after 60 s."""
TRAINING_MODE = "lora"
STATE_TYPES = ("weight", "weight_and_optimizer")
CHECKPOINT_TYPES = (*STATE_TYPES, "sampling")


class WeaverLora(LoraFields, kw_only=True):
    rank: int = 32


class WeaverCreateModel(msgspec.Struct):
    base_model: str
    model_seq_id: int = 0
    lora_config: WeaverLora = msgspec.field(default_factory=WeaverLora)
    training_mode: str = TRAINING_MODE
    training_max_sequence_length: int = 0


class WeaverSequencedPayload(msgspec.Struct):
    seq_id: int
    tensor_transport: str = "default"
    forward_input: msgspec.Raw = msgspec.Raw()
    forward_backward_input: msgspec.Raw = msgspec.Raw()
    adam_params: msgspec.Raw = msgspec.Raw()


class WeaverSequencedRequest(msgspec.Struct):
    payload: WeaverSequencedPayload


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


SequencedWork = Callable[[TrainingModel, WeaverSequencedPayload, TensorPack], Awaitable[Any]]


class WeaverTrainingRoutes:
    def __init__(
        self,
        service: TrainingService,
        operations: OperationScheduler,
        operation_routes: WeaverOperationRoutes,
    ) -> None:
        self._service = service
        self._operations = operations
        self._operation_routes = operation_routes
        self._call_orders: WeakKeyDictionary[TrainingModel, WeaverCallOrder] = WeakKeyDictionary()

    async def create(self, request: WeaverRequest) -> Response:
        body = request.parse(WeaverCreateModel)
        if body.training_mode != TRAINING_MODE:
            raise ProtocolError(
                f"training_mode: {body.training_mode!r} is not supported; supported: {TRAINING_MODE!r}"
            )
        if body.training_max_sequence_length > self._service.max_context:
            raise ProtocolError(
                f"training_max_sequence_length: received {body.training_max_sequence_length}; "
                f"{self._service.base_model} takes at most {self._service.max_context} tokens"
            )
        session_id, adapter = request.path_params["session"], body.lora_config.to_adapter_spec()
        # A client that repeats the call because it got no response gets the same model.
        key = f"create_model {session_id} {body.model_seq_id} {request.call_id}"
        model = await self._operation_routes.run(
            "create_model",
            request,
            lambda: self._service.create_model(session_id, request.owner, body.base_model, adapter),
            key=None if request.call_id is None else key,
            deadline=CREATE_DEADLINE,
        )
        return json_response(self._model_fields(model), 201)

    async def show(self, request: WeaverRequest) -> Response:
        return json_response(self._model_fields(self._find_model(request)))

    def _model_fields(self, model: TrainingModel) -> dict[str, Any]:
        return {
            "id": model.model_id,
            "session_id": model.session_id,
            "base_model": self._service.base_model,
            "tokenizer_path": self._service.tokenizer_path,
            "training_mode": TRAINING_MODE,
            "status": "running",
        }

    async def forward(self, request: WeaverRequest) -> Response:
        async def work(model: TrainingModel, payload: WeaverSequencedPayload, pack: TensorPack) -> Any:
            pass_input = parse_json(payload.forward_input, WeaverPassInput)
            batch = parse_batch(pass_input, pack, vocab_size=self._service.vocab_size, backward=False)
            logprobs = await model.forward(batch.samples)
            metrics: dict[str, float] = {}
            if batch.loss is not None:
                loss, metrics = compute_loss(batch.loss, batch.samples, logprobs)
                metrics["loss"] = loss
            return {"result": {"loss_fn_outputs": build_outputs(batch, logprobs), "metrics": metrics}}

        return await self._run_sequenced("forward", request, work)

    async def forward_backward(self, request: WeaverRequest) -> Response:
        async def work(model: TrainingModel, payload: WeaverSequencedPayload, pack: TensorPack) -> Any:
            pass_input = parse_json(payload.forward_backward_input, WeaverPassInput)
            batch = parse_batch(pass_input, pack, vocab_size=self._service.vocab_size, backward=True)
            assert batch.loss is not None
            result = await model.forward_backward(batch.samples, batch.loss)
            metrics = {**result.metrics, "loss": result.loss}
            return {"result": {"loss_fn_outputs": build_outputs(batch, result.logprobs), "metrics": metrics}}

        return await self._run_sequenced("forward_backward", request, work)

    async def optim_step(self, request: WeaverRequest) -> Response:
        async def work(model: TrainingModel, payload: WeaverSequencedPayload, pack: TensorPack) -> Any:
            step = await model.optim_step(parse_json(payload.adam_params, AdamFields).to_config())
            return {"metrics": {**step.metrics, "grad_norm": step.grad_norm}}

        return await self._run_sequenced("optim_step", request, work)

    async def _run_sequenced(self, kind: str, request: WeaverRequest, work: SequencedWork) -> Response:
        """Run a call that has a sequence id and return the response. Invalid content is an error of the
        operation, not of the request: the sequence id is used up either way, and later calls wait for it."""
        model = self._find_model(request)
        request, pack = unpack_request(request, self._service.limits.max_body)
        payload = request.parse(WeaverSequencedRequest).payload
        if payload.tensor_transport not in TRANSPORTS:
            raise ProtocolError(
                f"tensor_transport: received {payload.tensor_transport!r}; supported: {', '.join(TRANSPORTS)}"
            )
        return await self._run_in_order(
            kind, request, model, lambda: work(model, payload, pack), payload.seq_id
        )

    async def export(self, request: WeaverRequest) -> Response:
        model, body = self._find_model(request), request.parse(WeaverExportSampler)

        async def work() -> Any:
            info = await model.export(body.path or new_id("sampler"), ttl=body.ttl_seconds)
            return {**checkpoint_fields(info), "model_path": weaver_path(info)}

        return await self._run_in_order("export", request, model, work, body.seq_id)

    async def save(self, request: WeaverRequest) -> Response:
        model, body = self._find_model(request), request.parse(WeaverSaveState)
        if body.type not in CHECKPOINT_TYPES:
            raise ProtocolError(f"type: received {body.type!r}; supported: {', '.join(CHECKPOINT_TYPES)}")

        async def work() -> Any:
            name = body.name or new_id("checkpoint")
            if body.type == "sampling":
                return checkpoint_fields(await model.export(name, ttl=body.ttl_seconds))
            with_optimizer = body.type == "weight_and_optimizer"
            return checkpoint_fields(await model.save(name, optimizer=with_optimizer, ttl=body.ttl_seconds))

        return await self._run_in_order("save", request, model, work)

    async def load(self, request: WeaverRequest) -> Response:
        model, body = self._find_model(request), request.parse(WeaverLoadState)

        async def work() -> Any:
            await model.load(to_service_path(body.path), optimizer=body.include_optimizer)
            return {"path": body.path, "include_optimizer": body.include_optimizer}

        return await self._run_in_order("load", request, model, work)

    async def _run_in_order(
        self,
        kind: str,
        request: WeaverRequest,
        model: TrainingModel,
        work: OperationWork,
        seq: int | None = None,
    ) -> Response:
        def submit(queue_seq: int) -> str:
            return self._operations.submit(kind, request.owner, work, queue=model.model_id, seq=queue_seq)

        order = self._call_orders.setdefault(model, WeaverCallOrder())
        if seq is None:
            operation_id = order.submit_unnumbered(submit)
        else:
            operation_id = order.submit_numbered(seq, request.call_id, submit)
        return await self._operation_routes.respond(operation_id, request)

    async def checkpoints(self, request: WeaverRequest) -> Response:
        """Return a model's checkpoints, even if the model has ended."""
        checkpoints = self._service.checkpoints(request.owner, request.path_params["model"])
        if not checkpoints:
            self._find_model(request)
        return json_response({"items": [checkpoint_fields(info) for info in checkpoints]})

    async def terminate(self, request: WeaverRequest) -> Response:
        model = self._find_model(request)
        if "trainer" in request.parse(WeaverTerminate).instance_types:
            await self._service.end_model(model.model_id, request.owner)
            self._operations.close_queue(model.model_id)
        return json_response({"id": model.model_id, "status": "terminated"})

    def _find_model(self, request: WeaverRequest) -> TrainingModel:
        return self._service.model(request.path_params["model"], request.owner)
