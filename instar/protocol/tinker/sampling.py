"""Sampling sessions and their routes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from dataclasses import dataclass

import numpy as np
from starlette.responses import Response

from instar.protocol.base import ProtocolError, SampledSequence
from instar.protocol.http import json_response
from instar.protocol.operations import OperationScheduler
from instar.protocol.service import TrainingService
from instar.protocol.tinker import requests
from instar.protocol.tinker.http import TinkerRequest
from instar.protocol.tinker.passes import concatenate_chunks
from instar.protocol.tinker.results import TinkerSampleResult
from instar.types import Floats, Ids, SamplingParams

MAX_SAMPLING_SESSIONS = 10_000
"""The maximum number of sampling sessions across all owners. The oldest ones are dropped."""
MAX_SAMPLES_PER_REQUEST = 1024


@dataclass(frozen=True, slots=True)
class TinkerSamplingSession:
    session_id: str
    """The id of the client session that it belongs to."""
    owner: str
    path: str | None
    """The checkpoint's path, or None for the base model."""
    is_ephemeral: bool = False
    """True if the client did not name the weights. They are deleted when the client finishes the session."""


class TinkerSamplingSessions:
    """The sampling sessions of all owners, and the model ids of each client session."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, TinkerSamplingSession] = OrderedDict()
        self.model_ids: defaultdict[str, list[str]] = defaultdict(list)

    def open(
        self, session_id: str, seq_id: int, owner: str, path: str | None, *, is_ephemeral: bool = False
    ) -> str:
        """Open a sampling session, or replace the one with the same sequence id. Return its id."""
        sampling_id = f"{session_id}:sample:{seq_id}"
        self._sessions[sampling_id] = TinkerSamplingSession(session_id, owner, path, is_ephemeral)
        while len(self._sessions) > MAX_SAMPLING_SESSIONS:
            self._sessions.popitem(last=False)
        return sampling_id

    def find(self, sampling_id: str, owner: str) -> TinkerSamplingSession:
        session = self._sessions.get(sampling_id)
        if session is None or session.owner != owner:
            raise ProtocolError(
                f"sampling session {sampling_id} does not exist or has ended; create a new one", 404
            )
        return session

    def end(self, session_id: str) -> tuple[list[str], list[str]]:
        """Remove a client session. Return the ids of its models and the paths of its ephemeral weights."""
        sampling_ids = [
            sampling_id for sampling_id, session in self._sessions.items() if session.session_id == session_id
        ]
        ended = [self._sessions.pop(sampling_id) for sampling_id in sampling_ids]
        paths = [session.path for session in ended if session.is_ephemeral and session.path is not None]
        return self.model_ids.pop(session_id, []), paths


class TinkerRoutes:
    def __init__(
        self, service: TrainingService, operations: OperationScheduler, sessions: TinkerSamplingSessions
    ) -> None:
        self._service = service
        self._operations = operations
        self._sessions = sessions


class TinkerSamplingRoutes(TinkerRoutes):
    async def create(self, request: TinkerRequest) -> Response:
        body = request.parse(requests.CreateSamplingSessionRequest)
        self._service.heartbeat(body.session_id, request.owner)
        path = self._resolve_sampler_path(body.model_path, body.base_model, request.owner)
        sampling_id = self._sessions.open(body.session_id, body.sampling_session_seq_id, request.owner, path)
        return json_response({"type": "create_sampling_session", "sampling_session_id": sampling_id})

    async def get_info(self, request: TinkerRequest) -> Response:
        sampler_id = request.path_param("sampler_id")
        path = self._sessions.find(sampler_id, request.owner).path
        base_model = self._service.base_model
        return json_response({"sampler_id": sampler_id, "base_model": base_model, "model_path": path})

    async def sample(self, request: TinkerRequest) -> Response:
        body = request.parse(requests.SampleRequest)
        key = request.idempotency_key
        if body.sampling_session_id is not None:
            session = self._sessions.find(body.sampling_session_id, request.owner)
            self._service.heartbeat(session.session_id, request.owner)
            path = session.path
            if body.seq_id is not None:
                key = f"sample:{body.sampling_session_id}:{body.seq_id}"
        else:
            path = self._resolve_sampler_path(body.model_path, body.base_model, request.owner)
        request_id = self._operations.submit(
            "sample", request.owner, lambda: self._sample(body, path, request.owner), key=key
        )
        count = max(0, min(body.num_samples, MAX_SAMPLES_PER_REQUEST))
        return json_response(
            {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{i}" for i in range(count)]}
        )

    def _resolve_sampler_path(self, path: str | None, base_model: str | None, owner: str) -> str | None:
        if path is not None:
            return self._service.checkpoints.find(path, owner).path
        if base_model != self._service.base_model:
            raise ProtocolError(
                f"unknown base_model {base_model!r}; this server serves {self._service.base_model!r}"
            )
        return None

    async def _sample(self, body: requests.SampleRequest, path: str | None, owner: str) -> TinkerSampleResult:
        _check_request(body)
        prompt = concatenate_chunks(body.prompt.chunks, "prompt")
        params = _to_params(body.sampling_params, self._service.max_context)
        if not body.prompt_logprobs:
            return TinkerSampleResult(await self._generate(body, path, owner, prompt, params))
        sequences, logprobs = await asyncio.gather(
            self._generate(body, path, owner, prompt, params),
            self._service.compute_logprobs(path, owner, prompt.tolist()),
        )
        return TinkerSampleResult(sequences, _keep_last(logprobs, body.prompt_logprobs_last_n))

    async def _generate(
        self, body: requests.SampleRequest, path: str | None, owner: str, prompt: Ids, params: SamplingParams
    ) -> list[SampledSequence]:
        if body.prompt_logprobs and len(prompt) == self._service.max_context:
            # The context is full. Clients that want only prompt logprobs still request a token; return none.
            return [SampledSequence([], [], "length", "") for _ in range(body.num_samples)]
        return await self._service.sample(path, owner, prompt.tolist(), params, body.num_samples)


def _check_request(body: requests.SampleRequest) -> None:
    if not 1 <= body.num_samples <= MAX_SAMPLES_PER_REQUEST:
        raise ProtocolError(
            f"num_samples must be between 1 and {MAX_SAMPLES_PER_REQUEST}, got {body.num_samples}"
        )
    unsupported = {
        "topk_prompt_logprobs": body.topk_prompt_logprobs > 0,
        "topk_sample_logprobs": body.topk_sample_logprobs > 0,
        "prompt_alt_tokens_k": body.prompt_alt_tokens_k > 0,
        "target_prompt_logprobs": body.target_prompt_logprobs is not None,
        "record_stability_info": bool(body.record_stability_info),
    }
    if names := [name for name, is_set in unsupported.items() if is_set]:
        raise ProtocolError(f"unsupported fields: {', '.join(names)}; remove them from the request")


def _to_params(fields: requests.SamplingOptions, max_context: int) -> SamplingParams:
    if fields.stop == []:
        raise ProtocolError(
            "stop must not be empty, because stopping at end-of-text cannot be disabled; omit it, or list a "
            "stop sequence"
        )
    stop: list[str | int] = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    return fields.to_params(
        max_tokens=max_context,
        seed=fields.seed,
        stop=(word for word in stop if isinstance(word, str)),
        stop_token_ids=(token for token in stop if isinstance(token, int)),
    )


def _keep_last(logprobs: Floats, count: int | None) -> Floats:
    if count is None:
        return logprobs
    if not 1 <= count < len(logprobs):
        raise ProtocolError(f"prompt_logprobs_last_n must be between 1 and {len(logprobs) - 1}, got {count}")
    last_logprobs = logprobs.copy()
    last_logprobs[:-count] = np.nan
    return last_logprobs
