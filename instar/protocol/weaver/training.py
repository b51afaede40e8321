"""Routes of models: create, train, save, load, export, end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from instar.backends.values import loss_and_metrics
from instar.config import AdamConfig
from instar.protocol.base import Adapter, Operations, ProtocolError, TrainingModel, Workshop
from instar.protocol.weaver.checkpoints import shown, shown_path, workshop_path
from instar.protocol.weaver.data import PassInput, outputs, read_batch
from instar.protocol.weaver.http import Call, json_response, parse
from instar.protocol.weaver.order import Order
from instar.protocol.weaver.running import Running, Work
from instar.protocol.weaver.tensors import TRANSPORTS, Pack, unpacked
from instar.types import new_id

CREATE_DEADLINE = 50.0
"""The SDK gives a request up after 60 s."""
MODE = "lora"
STATE_TYPES = ("weight", "weight_and_optimizer")


class LoraFields(msgspec.Struct):
    """Defaults are those of the SDK's `LoraConfig`."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(msgspec.Struct):
    base_model: str
    model_seq_id: int = 0
    lora_config: LoraFields = msgspec.field(default_factory=LoraFields)
    training_mode: str = MODE
    training_max_sequence_length: int = 0


class Numbered(msgspec.Struct):
    seq_id: int
    tensor_transport: str = "default"
    forward_input: msgspec.Raw = msgspec.Raw()
    forward_backward_input: msgspec.Raw = msgspec.Raw()
    adam_params: msgspec.Raw = msgspec.Raw()


class Payload(msgspec.Struct):
    payload: Numbered


class AdamFields(msgspec.Struct):
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class ExportSampler(msgspec.Struct):
    seq_id: int
    path: str | None = None
    ttl_seconds: float | None = None


class SaveState(msgspec.Struct):
    type: str = "weight"
    name: str | None = None
    ttl_seconds: float | None = None


class LoadState(msgspec.Struct):
    path: str
    include_optimizer: bool = False


class Terminate(msgspec.Struct):
    instance_types: tuple[str, ...] = ("trainer",)


class Training:
    def __init__(self, workshop: Workshop, operations: Operations, running: Running) -> None:
        self._workshop = workshop
        self._operations = operations
        self._running = running
        self._orders: WeakKeyDictionary[TrainingModel, Order] = WeakKeyDictionary()

    async def create(self, call: Call) -> Response:
        given = call.parse(CreateModel)
        if given.training_mode != MODE:
            raise ProtocolError(f"training_mode {given.training_mode!r} is not offered; only {MODE!r} is")
        if given.training_max_sequence_length > self._workshop.max_context:
            raise ProtocolError(
                f"training_max_sequence_length {given.training_max_sequence_length} is more than the "
                f"{self._workshop.max_context} tokens that {self._workshop.base_model} takes"
            )
        lora = given.lora_config
        adapter = Adapter(lora.rank, lora.seed, lora.train_attn, lora.train_mlp, lora.train_unembed)
        model = await self._running.finish(
            "create_model",
            call,
            lambda: self._workshop.create_model(call.path["session"], call.owner, given.base_model, adapter),
            key=_creation(call, given),
            deadline=CREATE_DEADLINE,
        )
        return json_response(self._shown(model), 201)

    async def show(self, call: Call) -> Response:
        return json_response(self._shown(self._model(call)))

    def _shown(self, model: TrainingModel) -> dict[str, Any]:
        return {
            "id": model.model_id,
            "session_id": model.session_id,
            "base_model": self._workshop.base_model,
            "tokenizer_path": self._workshop.tokenizer_path,
            "training_mode": MODE,
            "status": "running",
        }

    async def forward(self, call: Call) -> Response:
        async def work(model: TrainingModel, given: Numbered, pack: Pack) -> Any:
            read = parse(given.forward_input, PassInput)
            batch = read_batch(read, pack, vocab_size=self._workshop.vocab_size, backward=False)
            logprobs = await model.forward(batch.samples)
            metrics: dict[str, float] = {}
            if batch.loss is not None:
                loss, metrics = loss_and_metrics(batch.loss, batch.samples, logprobs)
                metrics["loss"] = loss
            return {"result": {"loss_fn_outputs": outputs(batch, logprobs), "metrics": metrics}}

        return await self._numbered("forward", call, work)

    async def forward_backward(self, call: Call) -> Response:
        async def work(model: TrainingModel, given: Numbered, pack: Pack) -> Any:
            read = parse(given.forward_backward_input, PassInput)
            batch = read_batch(read, pack, vocab_size=self._workshop.vocab_size, backward=True)
            assert batch.loss is not None
            done = await model.forward_backward(batch.samples, batch.loss)
            metrics = {**done.metrics, "loss": done.loss}
            return {"result": {"loss_fn_outputs": outputs(batch, done.logprobs), "metrics": metrics}}

        return await self._numbered("forward_backward", call, work)

    async def optim_step(self, call: Call) -> Response:
        async def work(model: TrainingModel, given: Numbered, pack: Pack) -> Any:
            step = await model.optim_step(_adam(parse(given.adam_params, AdamFields)))
            return {"metrics": {**step.metrics, "grad_norm": step.grad_norm}}

        return await self._numbered("optim_step", call, work)

    async def _numbered(
        self, kind: str, call: Call, work: Callable[[TrainingModel, Numbered, Pack], Awaitable[Any]]
    ) -> Response:
        """What is wrong with its content is an error of the operation, not of the request: its sequence id
        is used up either way, and the ones that follow wait for it."""
        model = self._model(call)
        call, pack = unpacked(call, self._workshop.limits.max_body)
        given = call.parse(Payload).payload
        if given.tensor_transport not in TRANSPORTS:
            raise ProtocolError(
                f"tensor transport {given.tensor_transport!r} is not offered, only {', '.join(TRANSPORTS)}"
            )
        return await self._in_turn(kind, call, model, lambda: work(model, given, pack), given.seq_id)

    async def export(self, call: Call) -> Response:
        model, given = self._model(call), call.parse(ExportSampler)

        async def work() -> Any:
            info = await model.export(given.path or new_id("sampler"), ttl=given.ttl_seconds)
            return {**shown(info), "model_path": shown_path(info)}

        return await self._in_turn("export", call, model, work, given.seq_id)

    async def save(self, call: Call) -> Response:
        model, given = self._model(call), call.parse(SaveState)
        if given.type not in (*STATE_TYPES, "sampling"):
            raise ProtocolError(
                f"checkpoint type {given.type!r} is not one of {', '.join(STATE_TYPES)}, sampling"
            )

        async def work() -> Any:
            name = given.name or new_id("checkpoint")
            if given.type == "sampling":
                return shown(await model.export(name, ttl=given.ttl_seconds))
            with_optimizer = given.type == "weight_and_optimizer"
            return shown(await model.save(name, optimizer=with_optimizer, ttl=given.ttl_seconds))

        return await self._in_turn("save", call, model, work)

    async def load(self, call: Call) -> Response:
        model, given = self._model(call), call.parse(LoadState)

        async def work() -> Any:
            await model.load(workshop_path(given.path), optimizer=given.include_optimizer)
            return {"path": given.path, "include_optimizer": given.include_optimizer}

        return await self._in_turn("load", call, model, work)

    async def _in_turn(
        self,
        kind: str,
        call: Call,
        model: TrainingModel,
        work: Work,
        seq: int | None = None,
    ) -> Response:
        def submit(place: int) -> str:
            return self._operations.submit(kind, call.owner, work, lane=model.model_id, seq=place)

        order = self._orders.setdefault(model, Order())
        if seq is None:
            return await self._running.shown(order.unnumbered(submit), call)
        return await self._running.shown(order.numbered(seq, call.identity, submit), call)

    async def checkpoints(self, call: Call) -> Response:
        """Also those of a model that is over."""
        found = self._workshop.checkpoints(call.owner, call.path["model"])
        if not found:
            self._model(call)
        return json_response({"items": [shown(info) for info in found]})

    async def terminate(self, call: Call) -> Response:
        model = self._model(call)
        if "trainer" in call.parse(Terminate).instance_types:
            await self._workshop.end_model(model.model_id, call.owner)
            self._operations.end_lane(model.model_id)
        return json_response({"id": model.model_id, "status": "terminated"})

    def _model(self, call: Call) -> TrainingModel:
        return self._workshop.model(call.path["model"], call.owner)


def _creation(call: Call, given: CreateModel) -> str | None:
    """The same when a client asks again for the model whose answer it did not get."""
    if call.identity is None:
        return None
    return f"create_model {call.path['session']} {given.model_seq_id} {call.identity}"


def _adam(given: AdamFields) -> AdamConfig:
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
