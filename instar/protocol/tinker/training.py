"""The routes that create, train, save, load and unload models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from instar.backends.loss_values import compute_loss
from instar.protocol.base import AdapterSpec, ProtocolError
from instar.protocol.http import json_response, parse_json
from instar.protocol.models import TrainingModel
from instar.protocol.operations import OperationFunction
from instar.protocol.tinker import requests
from instar.protocol.tinker.http import TinkerRequest
from instar.protocol.tinker.passes import TinkerPass, parse_json_pass, parse_protobuf_pass, read_request_ids
from instar.protocol.tinker.results import TinkerPassResult, drop_non_finite
from instar.protocol.tinker.sampling import TinkerRoutes
from instar.types import Json

EPHEMERAL_TTL_SECONDS = 7 * 86400.0
"""How long unnamed weights are kept by default, unless the client finishes the session earlier."""
OPTIMIZER = "adamw"
SNAPSHOT = "snapshot"
"""The only kind of sampling client: it keeps the weights with which it was created."""
TinkerHandler = Callable[[TinkerRequest], Awaitable[Response]]


class TinkerTrainingRoutes(TinkerRoutes):
    def consume_rejected_seq_ids(self, handler: TinkerHandler) -> TinkerHandler:
        """Wrap a handler so that an invalid request (400 or 409) consumes its sequence id. Otherwise later
        operations would wait for the id, which clients do not send again."""

        async def handle(request: TinkerRequest) -> Response:
            try:
                return await handler(request)
            except ProtocolError as error:
                if error.status in (400, 409):
                    ids = read_request_ids(request.body, is_protobuf=request.is_protobuf)
                    if ids.seq_id is not None and ids.model_id:
                        model = self._service.find_model(ids.model_id, request.owner)
                        self._operations.reject(request.owner, model.model_id, ids.seq_id, error)
                raise

        return handle

    async def create_model(self, request: TinkerRequest) -> Response:
        body = request.parse(requests.CreateModelRequest)

        async def run() -> Json:
            if body.lora_config is None:
                raise ProtocolError("lora_config is missing; this server only trains LoRA adapters")
            model = await self._create_model(request.owner, body, body.base_model, body.lora_config)
            return {"type": "create_model", "model_id": model.model_id}

        return self._submit_creation("create_model", request, body, run)

    async def _create_model(
        self, owner: str, body: requests.CreateRequest, base_model: str, adapter: AdapterSpec
    ) -> TrainingModel:
        optimizer = (body.optimizer_config or {}).get("type", OPTIMIZER)
        if optimizer != OPTIMIZER:
            raise ProtocolError(f"unknown optimizer_config.type {optimizer!r}; supported: {OPTIMIZER!r}")
        # Clients derive the same id instead of reading it from the response.
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        model = await self._service.create_model(body.session_id, owner, base_model, adapter, model_id)
        self._sessions.model_ids[body.session_id].append(model_id)
        return model

    def _submit_creation(
        self, kind: str, request: TinkerRequest, body: requests.CreateRequest, run: OperationFunction
    ) -> Response:
        # Report an ended session in the response rather than in the operation's result.
        self._service.heartbeat(body.session_id, request.owner)
        key = f"create_model:{body.session_id}:{body.model_seq_id}"
        request_id = self._operations.submit(kind, request.owner, run, key=key)
        return json_response({"request_id": request_id})

    async def unload_model(self, request: TinkerRequest) -> Response:
        model_id = request.parse(requests.ModelRequest).model_id
        self._service.find_model(model_id, request.owner)

        async def run() -> Json:
            await self._service.close_model(model_id, request.owner)
            self._operations.close_queue(model_id)
            return {"type": "unload_model", "model_id": model_id}

        key = request.idempotency_key
        request_id = self._operations.submit("unload_model", request.owner, run, key=key)
        return json_response({"request_id": request_id})

    async def get_info(self, request: TinkerRequest) -> Response:
        model = self._service.find_model(request.parse(requests.ModelRequest).model_id, request.owner)
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
        if request.is_protobuf:
            return self._submit_pass(request, parse_protobuf_pass(request.body))
        return self._submit_pass(request, parse_json_pass(request.body, forward_only=False))

    async def forward(self, request: TinkerRequest) -> Response:
        return self._submit_pass(request, parse_json_pass(request.body, forward_only=True))

    async def optim_step(self, request: TinkerRequest) -> Response:
        body = request.parse(requests.OptimStepRequest)

        async def run(model: TrainingModel) -> Json:
            if body.adam_params is None:
                raise ProtocolError("adam_params is missing; send the AdamW settings")
            step = await model.optim_step(body.adam_params.to_config())
            return {"metrics": drop_non_finite({"grad_norm": step.grad_norm, **step.metrics})}

        return self._submit(request, "optim_step", body, run)

    async def save_weights(self, request: TinkerRequest) -> Response:
        body = request.parse(requests.SaveWeightsRequest)

        async def run(model: TrainingModel) -> Json:
            name = _require_name(body.path)
            if body.overwrite is False and any(
                info.kind == "state" and info.path.endswith(f"/{name}")
                for info in self._service.checkpoints.list_checkpoints(request.owner, model.model_id)
            ):
                raise ProtocolError(
                    f"checkpoint {name!r} already exists; choose a different name or set overwrite to true"
                )
            saved = await model.save(name, optimizer=True, ttl=body.ttl_seconds)
            return {"type": "save_weights", "path": saved.path}

        return self._submit(request, "save_weights", body, run)

    async def save_for_sampler(self, request: TinkerRequest) -> Response:
        body = request.parse(requests.SaveForSamplerRequest)
        seq_id = body.sampling_session_seq_id

        async def run(model: TrainingModel) -> Json:
            if body.kind != SNAPSHOT:
                raise ProtocolError(f"sampling client kind {body.kind!r} is not supported; use {SNAPSHOT!r}")
            if body.path is not None:
                saved = await model.export(_require_name(body.path), ttl=body.ttl_seconds)
                return {"type": "save_weights_for_sampler", "path": saved.path}
            if seq_id is None:
                raise ProtocolError("either path or sampling_session_seq_id is required")
            name = f"ephemeral-{seq_id}"
            saved = await model.export(name, ttl=body.ttl_seconds or EPHEMERAL_TTL_SECONDS)
            sampling_session_id = self._sessions.open(
                model.session_id, seq_id, request.owner, saved.path, is_ephemeral=True
            )
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampling_session_id}

        return self._submit(request, "save_weights_for_sampler", body, run)

    async def load_weights(self, request: TinkerRequest) -> Response:
        fields = parse_json(request.body, dict[str, Any])
        if fields.get("session_id") is not None:
            if fields.get("model_id") is not None:
                raise ProtocolError("model_id and session_id exclude each other; send only one of them")
            return self._create_from_weights(request)
        body = request.parse(requests.LoadWeightsRequest)

        async def run(model: TrainingModel) -> Json:
            await model.load(body.path, optimizer=body.optimizer)
            return {"type": "load_weights", "path": body.path, "model_id": model.model_id}

        return self._submit(request, "load_weights", body, run)

    def _create_from_weights(self, request: TinkerRequest) -> Response:
        body = request.parse(requests.CreateFromWeightsRequest)

        async def run() -> Json:
            # Check the path first, because creating a model may end an idle session.
            checkpoints = self._service.checkpoints
            info = checkpoints.find_state(body.path, request.owner, optimizer=body.optimizer)
            adapter = AdapterSpec(info.rank, **info.extra)
            model = await self._create_model(request.owner, body, body.base_model or info.base_model, adapter)
            try:
                await model.load(body.path, optimizer=body.optimizer)
            except BaseException:  # including cancellation: clients do not unload a model that failed to load
                with suppress(ProtocolError):  # the session may have ended, which closes its models
                    await self._service.close_model(model.model_id, request.owner)
                self._operations.close_queue(model.model_id)
                raise
            return {"type": "load_weights", "path": body.path, "model_id": model.model_id}

        return self._submit_creation("load_weights", request, body, run)

    def _submit_pass(self, request: TinkerRequest, training_pass: TinkerPass) -> Response:
        async def run(model: TrainingModel) -> TinkerPassResult:
            batch = training_pass.require_batch()
            if not training_pass.forward_only:
                result = await model.forward_backward(batch.samples, batch.loss)
                return TinkerPassResult.from_logprobs(result.loss, result.metrics, result.logprobs)
            logprobs = await model.forward(batch.samples)
            for sample, values in zip(batch.samples, logprobs, strict=True):
                values[sample.mask == 0] = float("nan")
            loss, metrics = compute_loss(batch.loss, batch.samples, logprobs)
            return TinkerPassResult.from_logprobs(loss, metrics, logprobs)

        body = requests.ModelRequest(training_pass.model_id, training_pass.seq)
        kind = "forward" if training_pass.forward_only else "forward_backward"
        return self._submit(request, kind, body, run)

    def _submit(
        self,
        request: TinkerRequest,
        kind: str,
        body: requests.ModelRequest,
        run: Callable[[TrainingModel], Awaitable[Any]],
    ) -> Response:
        """Submit an operation to the model's queue. Raises ProtocolError 404 if the model does not exist."""
        model = self._service.find_model(body.model_id, request.owner)
        request_id = self._operations.submit(
            kind,
            request.owner,
            lambda: run(model),
            queue_name=model.model_id,
            seq=body.seq_id,
            key=request.idempotency_key,
        )
        return json_response({"request_id": request_id, "model_id": model.model_id})


def _require_name(path: str | None) -> str:
    if not path:
        raise ProtocolError("path is missing or empty; send the checkpoint's name")
    return path
