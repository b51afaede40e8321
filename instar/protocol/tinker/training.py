"""Models in training: their passes, steps and checkpoints. Each call is an operation, asked for later."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from instar.backends.values import loss_and_metrics
from instar.config import AdamConfig
from instar.protocol.base import Adapter, Operations, ProtocolError, TrainingModel, Workshop
from instar.protocol.tinker.http import Call, Routes, answer
from instar.protocol.tinker.passes import Batch, Pass, from_json, from_protobuf
from instar.protocol.tinker.requests import (
    Adam,
    CreateModel,
    LoadWeights,
    Lora,
    OfModel,
    OptimStep,
    SaveForSampler,
    SaveWeights,
    Step,
)
from instar.protocol.tinker.results import PROTOBUF, PassResult, finite
from instar.protocol.tinker.sampling import SamplingSessions
from instar.types import Json

EPHEMERAL_SECONDS = 7 * 86400.0
"""For how long weights are kept that were saved for a sampling client without a name, unless their session
ends before."""
ADAM = "adamw"


class Training:
    def __init__(self, workshop: Workshop, operations: Operations, sessions: SamplingSessions) -> None:
        self._workshop = workshop
        self._operations = operations
        self._sessions = sessions

    def add_to(self, routes: Routes) -> None:
        routes.post("create_model", self.create_model)
        routes.post("unload_model", self.unload_model)
        routes.post("get_info", self.get_info)
        routes.post("forward_backward", self.forward_backward)
        routes.post("forward", self.forward)
        routes.post("optim_step", self.optim_step)
        routes.post("save_weights", self.save_weights)
        routes.post("save_weights_for_sampler", self.save_for_sampler)
        routes.post("load_weights", self.load_weights)

    async def create_model(self, call: Call) -> Response:
        asked = call.read(CreateModel)

        async def work() -> Json:
            optimizer = (asked.optimizer_config or {}).get("type", ADAM)
            if optimizer != ADAM:
                raise ProtocolError(f"optimizer_config: {optimizer!r} is not offered here, only {ADAM!r}")
            adapter = _adapter(asked.lora_config)
            model = await self._workshop.create_model(asked.session_id, call.owner, asked.base_model, adapter)
            self._sessions.add_model(asked.session_id, model.model_id)
            return {"type": "create_model", "model_id": model.model_id}

        # Checked now, so that a client whose session is gone hears it at once.
        self._workshop.heartbeat(asked.session_id, call.owner)
        key = f"create_model:{asked.session_id}:{asked.model_seq_id}"
        return answer({"request_id": self._operations.submit("create_model", call.owner, work, key=key)})

    async def unload_model(self, call: Call) -> Response:
        model_id = call.read(OfModel).model_id
        self._workshop.model(model_id, call.owner)

        async def work() -> Json:
            await self._workshop.end_model(model_id, call.owner)
            self._operations.end_lane(model_id)
            return {"type": "unload_model", "model_id": model_id}

        return answer({"request_id": self._operations.submit("unload_model", call.owner, work, key=call.key)})

    async def get_info(self, call: Call) -> Response:
        model = self._workshop.model(call.read(OfModel).model_id, call.owner)
        name = self._workshop.base_model
        return answer(
            {
                "type": "get_info",
                "model_id": model.model_id,
                "model_name": name,
                "is_lora": True,
                "lora_rank": model.adapter.rank,
                "model_data": {"model_name": name, "tokenizer_id": self._workshop.tokenizer_path},
            }
        )

    async def forward_backward(self, call: Call) -> Response:
        if call.http.headers.get("content-type", "").startswith(PROTOBUF):
            return self._submit_pass(call, from_protobuf(call.body))
        return self._submit_pass(call, from_json(call.body, forward_only=False))

    async def forward(self, call: Call) -> Response:
        return self._submit_pass(call, from_json(call.body, forward_only=True))

    async def optim_step(self, call: Call) -> Response:
        asked = call.read(OptimStep)

        async def work(model: TrainingModel) -> Json:
            result = await model.optim_step(_adam(asked.adam_params))
            return {"metrics": finite({"grad_norm": result.grad_norm, **result.metrics})}

        return self._submit(call, "optim_step", asked, work)

    async def save_weights(self, call: Call) -> Response:
        asked = call.read(SaveWeights)

        async def work(model: TrainingModel) -> Json:
            name = _named(asked.path)
            if asked.overwrite is False and self._has_state(model.model_id, name, call.owner):
                raise ProtocolError(f"{model.model_id} has a checkpoint {name!r} already; overwrite is false")
            saved = await model.save(name, optimizer=True, ttl=asked.ttl_seconds)
            return {"type": "save_weights", "path": saved.path}

        return self._submit(call, "save_weights", asked, work)

    async def save_for_sampler(self, call: Call) -> Response:
        asked = call.read(SaveForSampler)
        number = asked.sampling_session_seq_id

        async def work(model: TrainingModel) -> Json:
            if asked.path is not None:
                saved = await model.export(_named(asked.path), ttl=asked.ttl_seconds)
                return {"type": "save_weights_for_sampler", "path": saved.path}
            if number is None:
                raise ProtocolError("neither path nor sampling_session_seq_id is given")
            name = f"ephemeral-{number}"
            saved = await model.export(name, ttl=asked.ttl_seconds or EPHEMERAL_SECONDS)
            session = self._sessions.open(model.session_id, number, call.owner, saved.path, ephemeral=True)
            return {"type": "save_weights_for_sampler", "sampling_session_id": session}

        return self._submit(call, "save_weights_for_sampler", asked, work)

    async def load_weights(self, call: Call) -> Response:
        asked = call.read(LoadWeights)

        async def work(model: TrainingModel) -> Json:
            await model.load(asked.path, optimizer=asked.optimizer)
            return {"type": "load_weights", "path": asked.path, "model_id": model.model_id}

        return self._submit(call, "load_weights", asked, work)

    def _has_state(self, model_id: str, name: str, owner: str) -> bool:
        return any(
            info.kind == "state" and info.path.endswith(f"/{name}")
            for info in self._workshop.checkpoints(owner, model_id)
        )

    def _submit_pass(self, call: Call, asked: Pass) -> Response:
        async def work(model: TrainingModel) -> PassResult:
            run = _forward if asked.forward_only else _forward_backward
            return await run(model, asked.checked())

        step = Step(asked.model_id, asked.seq)
        return self._submit(call, "forward" if asked.forward_only else "forward_backward", step, work)

    def _submit(
        self, call: Call, kind: str, step: Step, work: Callable[[TrainingModel], Awaitable[Any]]
    ) -> Response:
        """In the order of the model's sequence ids. Raises ProtocolError 404 when the model is gone."""
        model = self._workshop.model(step.model_id, call.owner)
        request_id = self._operations.submit(
            kind, call.owner, lambda: work(model), lane=model.model_id, seq=step.seq_id, key=call.key
        )
        return answer({"request_id": request_id, "model_id": model.model_id})


async def _forward_backward(model: TrainingModel, batch: Batch) -> PassResult:
    result = await model.forward_backward(batch.samples, batch.loss)
    return PassResult.of(result.loss, result.metrics, result.logprobs)


async def _forward(model: TrainingModel, batch: Batch) -> PassResult:
    logprobs = await model.forward(batch.samples)
    for sample, values in zip(batch.samples, logprobs, strict=True):
        values[sample.mask == 0] = float("nan")
    loss, metrics = loss_and_metrics(batch.loss, batch.samples, logprobs)
    return PassResult.of(loss, metrics, logprobs)


def _adapter(lora: Lora | None) -> Adapter:
    if lora is None:
        raise ProtocolError("only LoRA adapters are trained here: lora_config is missing")
    return Adapter(
        rank=lora.rank,
        seed=lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )


def _adam(params: Adam | None) -> AdamConfig:
    """A rate of 0, which schedules begin or end with, is one here, though no run may ask for it."""
    if params is None:
        raise ProtocolError(f"adam_params are missing: the only optimizer here is {ADAM!r}")
    try:
        adam = AdamConfig(
            lr=params.learning_rate or 1.0,
            beta1=params.beta1,
            beta2=params.beta2,
            eps=params.eps,
            weight_decay=params.weight_decay,
            grad_clip_norm=params.grad_clip_norm,
        )
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ProtocolError(f"adam_params: {wrong['loc'][0]}: {wrong['msg']}") from error
    return adam.model_copy(update={"lr": params.learning_rate})


def _named(path: str | None) -> str:
    if not path:
        raise ProtocolError("a checkpoint needs a name: path is missing")
    return path
