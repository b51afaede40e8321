"""Routes of sampling sessions.

A sampling session is no more than the sampler that it names, and its id says which: it needs no memory, and
is still good after the server was started again.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec
from starlette.responses import Response

from instar.protocol.base import ProtocolError, TrainingService
from instar.protocol.weaver.checkpoints import to_service_path
from instar.protocol.weaver.datums import WeaverModelInput
from instar.protocol.weaver.http import WeaverRequest, json_response
from instar.protocol.weaver.operations import WeaverOperationRoutes
from instar.types import SamplingParams

PREFIX = "sampling-"


class WeaverCreateSampling(msgspec.Struct):
    base_model: str | None = None
    model_path: str | None = None


class WeaverSamplingParams(msgspec.Struct):
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: list[str] = []
    stop_token_ids: list[int] = []
    seed: int | None = None
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


class WeaverLogprobsRequest(msgspec.Struct):
    prompt: WeaverModelInput
    return_rollout_token_expert: bool = False


class WeaverSamplingRoutes:
    def __init__(self, service: TrainingService, running: WeaverOperationRoutes) -> None:
        self._service = service
        self._running = running

    async def create(self, request: WeaverRequest) -> Response:
        """With a path, the model's name is no more than a note."""
        given = request.parse(WeaverCreateSampling)
        self._service.heartbeat(request.path_params["session"], request.owner)
        if given.model_path:
            self._service.checkpoint(to_service_path(given.model_path), request.owner)
        elif given.base_model != self._service.base_model:
            raise ProtocolError(
                f"base_model {given.base_model!r} is not offered; {self._service.base_model!r} is", 404
            )
        return json_response(self._shown(_session_id(given.model_path), given.model_path), 201)

    async def show(self, request: WeaverRequest) -> Response:
        session_id = request.path_params["sampling"]
        return json_response(self._shown(session_id, _model_path(session_id)))

    def _shown(self, session_id: str, model_path: str | None) -> dict[str, Any]:
        return {
            "id": session_id,
            "base_model": self._service.base_model,
            "model_path": model_path,
            "tokenizer_path": self._service.tokenizer_path,
        }

    async def delete(self, request: WeaverRequest) -> Response:
        _model_path(request.path_params["sampling"])
        return Response(status_code=204)

    async def sample(self, request: WeaverRequest) -> Response:
        given = request.parse(WeaverSampleRequest)
        sampler = self._sampler(request)
        _refuse_extras(given)
        prompt = _prompt(given.prompt)
        params = self._params(given.sampling_params, len(prompt))

        async def work() -> Any:
            found = await self._service.sample(sampler, request.owner, prompt, params, given.num_samples)
            result: dict[str, Any] = {
                "sequences": [
                    {
                        "tokens": sequence.token_ids,
                        "text": sequence.text,
                        "logprobs": sequence.logprobs,
                        "stop_reason": sequence.stop_reason,
                    }
                    for sequence in found
                ]
            }
            if given.prompt_logprobs:
                result["prompt_logprobs"] = await self._service.logprobs(sampler, request.owner, prompt)
            return {"result": result}

        return await self._running.submit("sample", request, work)

    async def logprobs(self, request: WeaverRequest) -> Response:
        given = request.parse(WeaverLogprobsRequest)
        sampler = self._sampler(request)
        if given.return_rollout_token_expert:
            raise ProtocolError("return_rollout_token_expert is not offered here")
        prompt = _prompt(given.prompt)

        async def work() -> Any:
            return {
                "result": {"prompt_logprobs": await self._service.logprobs(sampler, request.owner, prompt)}
            }

        return await self._running.submit("logprobs", request, work)

    def _sampler(self, request: WeaverRequest) -> str | None:
        path = _model_path(request.path_params["sampling"])
        return None if path is None else self._service.checkpoint(to_service_path(path), request.owner).path

    def _params(self, given: WeaverSamplingParams, prompt_tokens: int) -> SamplingParams:
        room = self._service.max_context - prompt_tokens
        return SamplingParams(
            max_tokens=max(room, 1) if given.max_tokens is None else given.max_tokens,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=max(given.top_k, 0),
            seed=given.seed if given.seed is not None else given.sampling_seed,
            stop=tuple(given.stop),
            stop_token_ids=tuple(given.stop_token_ids),
        )


def _refuse_extras(given: WeaverSampleRequest) -> None:
    for name in (
        "topk_prompt_logprobs",
        "return_sampling_mask",
        "return_old_logprob",
        "return_moe_topk_indices",
        "score_centering",
    ):
        if getattr(given, name):
            raise ProtocolError(f"{name} is not offered here")


def _prompt(given: WeaverModelInput) -> list[int]:
    prompt = given.tokens().tolist()
    if not prompt:
        raise ProtocolError("the prompt is empty")
    return prompt


def _session_id(model_path: str | None) -> str:
    return PREFIX + base64.urlsafe_b64encode((model_path or "").encode()).decode().rstrip("=")


def _model_path(session_id: str) -> str | None:
    """What the session samples from; None: the base model."""
    code = session_id.removeprefix(PREFIX)
    try:
        path = base64.urlsafe_b64decode(code + "=" * (-len(code) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        path = None
    if path is None or _session_id(path) != session_id:
        raise ProtocolError(f"there is no sampling session {session_id}", 404)
    return path or None
