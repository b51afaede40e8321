"""The routes that create, train, save, load, export and terminate models."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from starlette.responses import Response

from instar.backends.loss_values import compute_loss
from instar.protocol.base import AdapterSpec, ProtocolError
from instar.protocol.http import find_sequence_id, json_response, parse_json
from instar.protocol.models import TrainingModel
from instar.protocol.operations import OperationFunction, OperationScheduler
from instar.protocol.service import TrainingService
from instar.protocol.weaver.checkpoints import checkpoint_fields, to_service_path, to_weaver_path
from instar.protocol.weaver.datums import WeaverBatch, WeaverPassInput, build_outputs, parse_batch
from instar.protocol.weaver.http import WeaverRequest, WeaverRoutes
from instar.protocol.weaver.tensors import TRANSPORTS, TensorPack, unpack_request
from instar.protocol.wire import AdamFields
from instar.types import new_id

CREATE_TIMEOUT_SECONDS = 50.0
"""The time limit for creating a model. The SDK gives up after 60 s."""
TRAINING_MODE = "lora"
CHECKPOINT_TYPES = ("weight", "weight_and_optimizer", "sampling")


class WeaverLora(AdapterSpec, frozen=True):
    rank: int = 32
    train_unembed: bool = True


class WeaverCreateModelRequest(msgspec.Struct):
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


class WeaverExportSamplerRequest(msgspec.Struct):
    seq_id: int
    path: str | None = None
    ttl_seconds: float | None = None


class WeaverSaveStateRequest(msgspec.Struct):
    type: str = "weight"
    name: str | None = None
    ttl_seconds: float | None = None


class WeaverLoadStateRequest(msgspec.Struct):
    path: str
    include_optimizer: bool = False


class WeaverTerminateRequest(msgspec.Struct):
    instance_types: tuple[str, ...] = ("trainer",)


SequencedFunction = Callable[[TrainingModel, WeaverSequencedPayload, TensorPack], Awaitable[Any]]
SubmitFunction = Callable[[int, int], str]


class WeaverCallOrder:
    """Assigns sequence ids to the calls for one model.

    Weaver's SDK numbers passes, steps and exports, but not saves and loads. An unnumbered call must run after
    all calls that arrived before it and before all later ones, so it takes the next sequence id and shifts
    those of later calls by one. ``submit`` receives the shifted sequence id and the offset by which it was
    shifted, and returns the operation id. If ``submit`` raises, the sequence id remains unused.
    """

    def __init__(self) -> None:
        self._call_ids: dict[int, str | None] = {}
        self._highest_seq = 0
        self._inserted_after: list[int] = []
        """For each unnumbered call, the highest sequence id that had arrived before it."""

    def submit_numbered(self, seq: int, call_id: str | None, submit: SubmitFunction) -> str:
        """Submit a call with the client's sequence id and return the operation id. A retry has the same
        ``call_id``. Raises ProtocolError 409 if a different call has used the sequence id."""
        previous_id = self._call_ids.get(seq)
        if previous_id is not None and call_id is not None and previous_id != call_id:
            raise ProtocolError(
                f"sequence id {seq} was already used by a different call, and only one client can train a "
                "model; create a new model and load a saved state",
                409,
            )
        offset = bisect_left(self._inserted_after, seq)
        operation_id = submit(seq + offset, offset)
        self._call_ids[seq] = call_id
        self._highest_seq = max(self._highest_seq, seq)
        return operation_id

    def submit_unnumbered(self, submit: SubmitFunction) -> str:
        # A retried call runs twice, which is harmless for a save or a load.
        offset = len(self._inserted_after) + 1
        operation_id = submit(self._highest_seq + offset, offset)
        self._inserted_after.append(self._highest_seq)
        return operation_id


class WeaverTrainingRoutes(WeaverRoutes):
    def __init__(self, service: TrainingService, operations: OperationScheduler) -> None:
        super().__init__(service, operations)
        self._call_orders: WeakKeyDictionary[TrainingModel, WeaverCallOrder] = WeakKeyDictionary()

    async def create(self, request: WeaverRequest) -> Response:
        body = request.parse(WeaverCreateModelRequest)
        if body.training_mode != TRAINING_MODE:
            raise ProtocolError(
                f"unsupported training_mode {body.training_mode!r}; supported: {TRAINING_MODE!r}"
            )
        if body.training_max_sequence_length > self._service.max_context:
            raise ProtocolError(
                f"training_max_sequence_length must be at most {self._service.max_context}, "
                f"got {body.training_max_sequence_length}"
            )
        session_id, owner = request.path_params["session"], request.owner
        # A client that retries the call because it received no response gets the same model.
        key = f"create_model {session_id} {body.model_seq_id} {request.call_id}"
        operation_id = self._operations.submit(
            "create_model",
            owner,
            lambda: self._service.create_model(session_id, owner, body.base_model, body.lora_config),
            key=None if request.call_id is None else key,
        )
        result = await self._operations.wait(operation_id, owner, CREATE_TIMEOUT_SECONDS)
        if result is None:
            message = f"create_model did not finish within {CREATE_TIMEOUT_SECONDS:g} s; try again"
            raise ProtocolError(message, 503, "server")
        if result.error is not None:
            raise result.error
        return json_response(self._model_fields(result.value), 201)

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
        async def run(model: TrainingModel, payload: WeaverSequencedPayload, pack: TensorPack) -> Any:
            batch = self._parse_batch(payload.forward_input, pack, is_backward=False)
            logprobs = await model.forward(batch.samples)
            metrics: dict[str, float] = {}
            if batch.loss is not None:
                loss, metrics = compute_loss(batch.loss, batch.samples, logprobs)
                metrics["loss"] = loss
            return {"result": {"loss_fn_outputs": build_outputs(batch, logprobs), "metrics": metrics}}

        return await self._run_sequenced("forward", request, run)

    async def forward_backward(self, request: WeaverRequest) -> Response:
        async def run(model: TrainingModel, payload: WeaverSequencedPayload, pack: TensorPack) -> Any:
            batch = self._parse_batch(payload.forward_backward_input, pack, is_backward=True)
            assert batch.loss is not None
            result = await model.forward_backward(batch.samples, batch.loss)
            metrics = {**result.metrics, "loss": result.loss}
            return {"result": {"loss_fn_outputs": build_outputs(batch, result.logprobs), "metrics": metrics}}

        return await self._run_sequenced("forward_backward", request, run)

    def _parse_batch(self, pass_input: msgspec.Raw, pack: TensorPack, *, is_backward: bool) -> WeaverBatch:
        parsed_input = parse_json(pass_input, WeaverPassInput)
        return parse_batch(parsed_input, pack, vocab_size=self._service.vocab_size, is_backward=is_backward)

    async def optim_step(self, request: WeaverRequest) -> Response:
        async def run(model: TrainingModel, payload: WeaverSequencedPayload, pack: TensorPack) -> Any:
            step = await model.optim_step(parse_json(payload.adam_params, AdamFields).to_config())
            return {"metrics": {**step.metrics, "grad_norm": step.grad_norm}}

        return await self._run_sequenced("optim_step", request, run)

    async def _run_sequenced(
        self, kind: str, request: WeaverRequest, function: SequencedFunction
    ) -> Response:
        # ``function`` parses the data, because a request with invalid data must still use up its sequence id.
        model = self._find_model(request)
        with self._consume_rejected_seq_id(request, model):
            request, pack = unpack_request(request, self._service.limits.max_body)
            payload = request.parse(WeaverSequencedRequest).payload
            if payload.tensor_transport not in TRANSPORTS:
                raise ProtocolError(
                    f"unsupported tensor_transport {payload.tensor_transport!r}; "
                    f"supported: {', '.join(TRANSPORTS)}"
                )
        return await self._run_in_order(
            kind, request, model, lambda: function(model, payload, pack), payload.seq_id
        )

    @contextmanager
    def _consume_rejected_seq_id(self, request: WeaverRequest, model: TrainingModel) -> Generator[None]:
        """Consume the sequence id of a request that is rejected in the block. Otherwise later calls would
        wait for the id, which clients do not send again."""
        try:
            yield
        except ProtocolError as error:
            rejection = error

            def submit(queue_seq: int, offset: int) -> str:
                return self._operations.reject(
                    request.owner, model.model_id, queue_seq, rejection, offset=offset
                )

            if (seq := find_sequence_id(request.body)) is not None:
                self._get_order(model).submit_numbered(seq, request.call_id, submit)
            raise

    async def export(self, request: WeaverRequest) -> Response:
        model = self._find_model(request)
        with self._consume_rejected_seq_id(request, model):
            body = request.parse(WeaverExportSamplerRequest)

        async def run() -> Any:
            info = await model.export(body.path or new_id("sampler"), ttl=body.ttl_seconds)
            return {**checkpoint_fields(info), "model_path": to_weaver_path(info)}

        return await self._run_in_order("export", request, model, run, body.seq_id)

    async def save(self, request: WeaverRequest) -> Response:
        model, body = self._find_model(request), request.parse(WeaverSaveStateRequest)
        if body.type not in CHECKPOINT_TYPES:
            raise ProtocolError(f"unknown type {body.type!r}; supported: {', '.join(CHECKPOINT_TYPES)}")

        async def run() -> Any:
            name = body.name or new_id("checkpoint")
            if body.type == "sampling":
                return checkpoint_fields(await model.export(name, ttl=body.ttl_seconds))
            with_optimizer = body.type == "weight_and_optimizer"
            return checkpoint_fields(await model.save(name, optimizer=with_optimizer, ttl=body.ttl_seconds))

        return await self._run_in_order("save", request, model, run)

    async def load(self, request: WeaverRequest) -> Response:
        model, body = self._find_model(request), request.parse(WeaverLoadStateRequest)

        async def run() -> Any:
            await model.load(to_service_path(body.path), optimizer=body.include_optimizer)
            return {"path": body.path, "include_optimizer": body.include_optimizer}

        return await self._run_in_order("load", request, model, run)

    async def _run_in_order(
        self,
        kind: str,
        request: WeaverRequest,
        model: TrainingModel,
        function: OperationFunction,
        seq: int | None = None,
    ) -> Response:
        def submit(queue_seq: int, offset: int) -> str:
            return self._operations.submit(
                kind, request.owner, function, queue_name=model.model_id, seq=queue_seq, offset=offset
            )

        order = self._get_order(model)
        if seq is None:
            operation_id = order.submit_unnumbered(submit)
        else:
            operation_id = order.submit_numbered(seq, request.call_id, submit)
        return await self._respond(operation_id, request)

    def _get_order(self, model: TrainingModel) -> WeaverCallOrder:
        return self._call_orders.setdefault(model, WeaverCallOrder())

    async def list_checkpoints(self, request: WeaverRequest) -> Response:
        """Return a model's checkpoints, even if the model was closed."""
        checkpoints = self._service.checkpoints.list_checkpoints(request.owner, request.path_params["model"])
        if not checkpoints:
            self._find_model(request)
        return json_response({"items": [checkpoint_fields(info) for info in checkpoints]})

    async def terminate(self, request: WeaverRequest) -> Response:
        model = self._find_model(request)
        if "trainer" in request.parse(WeaverTerminateRequest).instance_types:
            await self._service.close_model(model.model_id, request.owner)
            self._operations.close_queue(model.model_id)
        return json_response({"id": model.model_id, "status": "terminated"})

    def _find_model(self, request: WeaverRequest) -> TrainingModel:
        return self._service.find_model(request.path_params["model"], request.owner)
