"""Models in training: their passes, steps and checkpoints. Each call is an operation, asked for later."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

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
from instar.protocol.tinker.http import TinkerRequest, TinkerRouter, json_response
from instar.protocol.tinker.passes import TinkerBatch, TinkerPass, parse_json_pass, parse_protobuf_pass
from instar.protocol.tinker.requests import (
    TinkerAdam,
    TinkerCreateModel,
    TinkerLoadWeights,
    TinkerLora,
    TinkerModelRef,
    TinkerModelRequest,
    TinkerOptimStep,
    TinkerSaveForSampler,
    TinkerSaveWeights,
)
from instar.protocol.tinker.results import PROTOBUF, TinkerPassResult, drop_non_finite
from instar.protocol.tinker.sampling import TinkerSamplingSessions
from instar.types import Json

EPHEMERAL_SECONDS = 7 * 86400.0
"""For how long weights are kept that were saved for a sampling client without a name, unless their session
ends before."""
ADAM = "adamw"


class TinkerTrainingRoutes:
    def __init__(
        self, service: TrainingService, operations: OperationScheduler, sessions: TinkerSamplingSessions
    ) -> None:
        self._service = service
        self._operations = operations
        self._sessions = sessions

    def register(self, routes: TinkerRouter) -> None:
        routes.post("create_model", self.create_model)
        routes.post("unload_model", self.unload_model)
        routes.post("get_info", self.get_info)
        routes.post("forward_backward", self.forward_backward)
        routes.post("forward", self.forward)
        routes.post("optim_step", self.optim_step)
        routes.post("save_weights", self.save_weights)
        routes.post("save_weights_for_sampler", self.save_for_sampler)
        routes.post("load_weights", self.load_weights)

    async def create_model(self, request: TinkerRequest) -> Response:
        asked = request.parse(TinkerCreateModel)

        async def work() -> Json:
            optimizer = (asked.optimizer_config or {}).get("type", ADAM)
            if optimizer != ADAM:
                raise ProtocolError(f"optimizer_config: {optimizer!r} is not offered here, only {ADAM!r}")
            adapter = _adapter(asked.lora_config)
            model = await self._service.create_model(
                asked.session_id, request.owner, asked.base_model, adapter
            )
            self._sessions.add_model(asked.session_id, model.model_id)
            return {"type": "create_model", "model_id": model.model_id}

        # Checked now, so that a client whose session is gone hears it at once.
        self._service.heartbeat(asked.session_id, request.owner)
        key = f"create_model:{asked.session_id}:{asked.model_seq_id}"
        return json_response(
            {"request_id": self._operations.submit("create_model", request.owner, work, key=key)}
        )

    async def unload_model(self, request: TinkerRequest) -> Response:
        model_id = request.parse(TinkerModelRef).model_id
        self._service.model(model_id, request.owner)

        async def work() -> Json:
            await self._service.end_model(model_id, request.owner)
            self._operations.close_queue(model_id)
            return {"type": "unload_model", "model_id": model_id}

        return json_response(
            {
                "request_id": self._operations.submit(
                    "unload_model", request.owner, work, key=request.idempotency_key
                )
            }
        )

    async def get_info(self, request: TinkerRequest) -> Response:
        model = self._service.model(request.parse(TinkerModelRef).model_id, request.owner)
        name = self._service.base_model
        return json_response(
            {
                "type": "get_info",
                "model_id": model.model_id,
                "model_name": name,
                "is_lora": True,
                "lora_rank": model.adapter.rank,
                "model_data": {"model_name": name, "tokenizer_id": self._service.tokenizer_path},
            }
        )

    async def forward_backward(self, request: TinkerRequest) -> Response:
        if request.http.headers.get("content-type", "").startswith(PROTOBUF):
            return self._submit_pass(request, parse_protobuf_pass(request.body))
        return self._submit_pass(request, parse_json_pass(request.body, forward_only=False))

    async def forward(self, request: TinkerRequest) -> Response:
        return self._submit_pass(request, parse_json_pass(request.body, forward_only=True))

    async def optim_step(self, request: TinkerRequest) -> Response:
        asked = request.parse(TinkerOptimStep)

        async def work(model: TrainingModel) -> Json:
            result = await model.optim_step(_adam(asked.adam_params))
            return {"metrics": drop_non_finite({"grad_norm": result.grad_norm, **result.metrics})}

        return self._submit(request, "optim_step", asked, work)

    async def save_weights(self, request: TinkerRequest) -> Response:
        asked = request.parse(TinkerSaveWeights)

        async def work(model: TrainingModel) -> Json:
            name = _named(asked.path)
            if asked.overwrite is False and self._has_state(model.model_id, name, request.owner):
                raise ProtocolError(f"{model.model_id} has a checkpoint {name!r} already; overwrite is false")
            saved = await model.save(name, optimizer=True, ttl=asked.ttl_seconds)
            return {"type": "save_weights", "path": saved.path}

        return self._submit(request, "save_weights", asked, work)

    async def save_for_sampler(self, request: TinkerRequest) -> Response:
        asked = request.parse(TinkerSaveForSampler)
        number = asked.sampling_session_seq_id

        async def work(model: TrainingModel) -> Json:
            if asked.path is not None:
                saved = await model.export(_named(asked.path), ttl=asked.ttl_seconds)
                return {"type": "save_weights_for_sampler", "path": saved.path}
            if number is None:
                raise ProtocolError("neither path nor sampling_session_seq_id is given")
            name = f"ephemeral-{number}"
            saved = await model.export(name, ttl=asked.ttl_seconds or EPHEMERAL_SECONDS)
            session = self._sessions.open(model.session_id, number, request.owner, saved.path, ephemeral=True)
            return {"type": "save_weights_for_sampler", "sampling_session_id": session}

        return self._submit(request, "save_weights_for_sampler", asked, work)

    async def load_weights(self, request: TinkerRequest) -> Response:
        asked = request.parse(TinkerLoadWeights)

        async def work(model: TrainingModel) -> Json:
            await model.load(asked.path, optimizer=asked.optimizer)
            return {"type": "load_weights", "path": asked.path, "model_id": model.model_id}

        return self._submit(request, "load_weights", asked, work)

    def _has_state(self, model_id: str, name: str, owner: str) -> bool:
        return any(
            info.kind == "state" and info.path.endswith(f"/{name}")
            for info in self._service.checkpoints(owner, model_id)
        )

    def _submit_pass(self, request: TinkerRequest, asked: TinkerPass) -> Response:
        async def work(model: TrainingModel) -> TinkerPassResult:
            run = _forward if asked.forward_only else _forward_backward
            return await run(model, asked.require_batch())

        step = TinkerModelRequest(asked.model_id, asked.seq)
        return self._submit(request, "forward" if asked.forward_only else "forward_backward", step, work)

    def _submit(
        self,
        request: TinkerRequest,
        kind: str,
        step: TinkerModelRequest,
        work: Callable[[TrainingModel], Awaitable[Any]],
    ) -> Response:
        """In the order of the model's sequence ids. Raises ProtocolError 404 when the model is gone."""
        model = self._service.model(step.model_id, request.owner)
        request_id = self._operations.submit(
            kind,
            request.owner,
            lambda: work(model),
            queue=model.model_id,
            seq=step.seq_id,
            key=request.idempotency_key,
        )
        return json_response({"request_id": request_id, "model_id": model.model_id})


async def _forward_backward(model: TrainingModel, batch: TinkerBatch) -> TinkerPassResult:
    result = await model.forward_backward(batch.samples, batch.loss)
    return TinkerPassResult.from_logprobs(result.loss, result.metrics, result.logprobs)


async def _forward(model: TrainingModel, batch: TinkerBatch) -> TinkerPassResult:
    logprobs = await model.forward(batch.samples)
    for sample, values in zip(batch.samples, logprobs, strict=True):
        values[sample.mask == 0] = float("nan")
    loss, metrics = compute_loss(batch.loss, batch.samples, logprobs)
    return TinkerPassResult.from_logprobs(loss, metrics, logprobs)


def _adapter(lora: TinkerLora | None) -> AdapterSpec:
    if lora is None:
        raise ProtocolError("only LoRA adapters are trained here: lora_config is missing")
    return AdapterSpec(
        rank=lora.rank,
        seed=lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )


def _adam(params: TinkerAdam | None) -> AdamConfig:
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
