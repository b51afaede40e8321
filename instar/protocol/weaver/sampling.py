"""The routes for sampling sessions.

The id of a sampling session encodes the path of its sampler, so the server does not store sampling sessions,
and their ids remain valid after a restart.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec
from starlette.responses import Response

from instar.protocol.base import ProtocolError
from instar.protocol.http import json_response
from instar.protocol.weaver.checkpoints import to_service_path
from instar.protocol.weaver.datums import WeaverModelInput
from instar.protocol.weaver.http import WeaverRequest, WeaverRoutes
from instar.protocol.wire import SamplingFields

ID_PREFIX = "sampling-"


class WeaverCreateSamplingSessionRequest(msgspec.Struct):
    base_model: str | None = None
    model_path: str | None = None


class WeaverSamplingParams(SamplingFields, kw_only=True):
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None


class WeaverSampleRequest(msgspec.Struct):
    prompt: WeaverModelInput
    sampling_params: WeaverSamplingParams = msgspec.field(default_factory=WeaverSamplingParams)
    num_samples: int = 1
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    return_sampling_mask: bool = False
    return_old_logprob: bool = False
    return_moe_topk_indices: bool = False
    score_centering: dict[str, Any] = {}


UNSUPPORTED_FIELDS = (
    "topk_prompt_logprobs",
    "return_sampling_mask",
    "return_old_logprob",
    "return_moe_topk_indices",
    "score_centering",
)


class WeaverLogprobsRequest(msgspec.Struct):
    prompt: WeaverModelInput
    return_rollout_token_expert: bool = False


class WeaverSamplingRoutes(WeaverRoutes):
    async def create(self, request: WeaverRequest) -> Response:
        """Create a sampling session. ``base_model`` is ignored if ``model_path`` is set."""
        body = request.parse(WeaverCreateSamplingSessionRequest)
        self._service.heartbeat(request.path_params["session"], request.owner)
        if body.model_path:
            self._service.checkpoints.find(to_service_path(body.model_path), request.owner)
        elif body.base_model != self._service.base_model:
            raise ProtocolError(
                f"unknown base_model {body.base_model!r}; this server serves {self._service.base_model!r}",
                404,
            )
        return json_response(self._session_fields(_encode_id(body.model_path), body.model_path), 201)

    async def show(self, request: WeaverRequest) -> Response:
        session_id = request.path_params["sampling"]
        return json_response(self._session_fields(session_id, _decode_id(session_id)))

    def _session_fields(self, session_id: str, model_path: str | None) -> dict[str, Any]:
        return {
            "id": session_id,
            "base_model": self._service.base_model,
            "model_path": model_path,
            "tokenizer_path": self._service.tokenizer_path,
        }

    async def delete(self, request: WeaverRequest) -> Response:
        _decode_id(request.path_params["sampling"])  # Nothing is stored, so only the id is checked.
        return Response(status_code=204)

    async def sample(self, request: WeaverRequest) -> Response:
        body = request.parse(WeaverSampleRequest)
        sampler_path, owner = self._resolve_sampler_path(request), request.owner
        for name in UNSUPPORTED_FIELDS:
            if getattr(body, name):
                raise ProtocolError(f"this server does not support {name}; remove it from the request")
        prompt = _require_prompt(body.prompt)
        fields = body.sampling_params
        params = fields.to_params(
            max_tokens=max(self._service.max_context - len(prompt), 1),
            seed=fields.seed if fields.seed is not None else fields.sampling_seed,
            stop=fields.stop,
            stop_token_ids=fields.stop_token_ids,
        )

        async def run() -> Any:
            sequences = await self._service.sample(sampler_path, owner, prompt, params, body.num_samples)
            fields = [sequence.to_fields() | {"text": sequence.text} for sequence in sequences]
            result: dict[str, Any] = {"sequences": fields}
            if body.prompt_logprobs:
                result["prompt_logprobs"] = await self._service.compute_logprobs(sampler_path, owner, prompt)
            return {"result": result}

        return await self._respond(self._operations.submit("sample", owner, run), request)

    async def compute_logprobs(self, request: WeaverRequest) -> Response:
        body = request.parse(WeaverLogprobsRequest)
        sampler_path = self._resolve_sampler_path(request)
        if body.return_rollout_token_expert:
            raise ProtocolError(
                "this server does not support return_rollout_token_expert; remove it from the request"
            )
        prompt = _require_prompt(body.prompt)

        async def run() -> Any:
            logprobs = await self._service.compute_logprobs(sampler_path, request.owner, prompt)
            return {"result": {"prompt_logprobs": logprobs}}

        return await self._respond(self._operations.submit("logprobs", request.owner, run), request)

    def _resolve_sampler_path(self, request: WeaverRequest) -> str | None:
        path = _decode_id(request.path_params["sampling"])
        if path is None:
            return None
        return self._service.checkpoints.find(to_service_path(path), request.owner).path


def _require_prompt(model_input: WeaverModelInput) -> list[int]:
    prompt = model_input.decode_tokens().tolist()
    if not prompt:
        raise ProtocolError("prompt is empty; send at least one token")
    return prompt


def _encode_id(model_path: str | None) -> str:
    return ID_PREFIX + base64.urlsafe_b64encode((model_path or "").encode()).decode().rstrip("=")


def _decode_id(session_id: str) -> str | None:
    """Decode the sampler path (None: the base model). Raises ProtocolError 404 if the id is invalid."""
    encoded = session_id.removeprefix(ID_PREFIX)
    try:
        path = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        path = None
    if path is None or _encode_id(path) != session_id:
        raise ProtocolError(f"sampling session {session_id} does not exist", 404)
    return path or None
