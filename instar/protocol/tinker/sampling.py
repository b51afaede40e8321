"""Sampling sessions, and sampling in them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from starlette.responses import Response

from instar.protocol.base import OperationScheduler, ProtocolError, SampledSequence, TrainingService
from instar.protocol.tinker.http import TinkerRequest, TinkerRouter, json_response
from instar.protocol.tinker.passes import text_tokens
from instar.protocol.tinker.requests import TinkerCreateSampling, TinkerSampleRequest, TinkerSamplingParams
from instar.protocol.tinker.results import TinkerSampleResult
from instar.types import Floats, Ids, SamplingParams

MOST_SESSIONS = 10_000
"""Sampling sessions that are remembered, over all owners. Beyond it the oldest is forgotten."""
MOST_SAMPLES = 1024
"""Of one request."""


@dataclass(frozen=True, slots=True)
class TinkerSamplingSession:
    session_id: str
    owner: str
    path: str | None
    """Of the sampler; None samples from the base model."""
    ephemeral: bool = False
    """Whether its weights have no name, and go when the session ends."""


class TinkerSamplingSessions:
    """Which weights a client samples from, by the id that it was given; and what else ends with a session."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, TinkerSamplingSession] = OrderedDict()
        self._models: dict[str, list[str]] = {}

    def open(
        self, session_id: str, number: int, owner: str, path: str | None, *, ephemeral: bool = False
    ) -> str:
        """Opened again with the same number, it is the same one."""
        sampling_id = f"{session_id}:sample:{number}"
        self._sessions[sampling_id] = TinkerSamplingSession(session_id, owner, path, ephemeral)
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return sampling_id

    def find(self, sampling_id: str, owner: str) -> TinkerSamplingSession:
        found = self._sessions.get(sampling_id)
        if found is None or found.owner != owner:
            raise ProtocolError(
                f"there is no sampling session {sampling_id}: it has ended, or the server was restarted", 404
            )
        return found

    def add_model(self, session_id: str, model_id: str) -> None:
        self._models.setdefault(session_id, []).append(model_id)

    def end(self, session_id: str) -> tuple[list[str], list[str]]:
        """The models of the session, and the weights that go with it."""
        ended = {name: s for name, s in self._sessions.items() if s.session_id == session_id}
        for name in ended:
            del self._sessions[name]
        weights = [s.path for s in ended.values() if s.ephemeral and s.path is not None]
        return self._models.pop(session_id, []), weights


class TinkerSamplingRoutes:
    def __init__(
        self, service: TrainingService, operations: OperationScheduler, sessions: TinkerSamplingSessions
    ) -> None:
        self._service = service
        self._operations = operations
        self._sessions = sessions

    def register(self, routes: TinkerRouter) -> None:
        routes.post("create_sampling_session", self.create)
        routes.post("asample", self.sample)
        routes.get("samplers/{sampler_id}", self.info)

    async def create(self, request: TinkerRequest) -> Response:
        asked = request.parse(TinkerCreateSampling)
        self._service.heartbeat(asked.session_id, request.owner)
        path = self._sampler(asked.model_path, asked.base_model, request.owner)
        opened = self._sessions.open(asked.session_id, asked.sampling_session_seq_id, request.owner, path)
        return json_response({"type": "create_sampling_session", "sampling_session_id": opened})

    async def info(self, request: TinkerRequest) -> Response:
        sampler_id = request.path_param("sampler_id")
        found = self._sessions.find(sampler_id, request.owner)
        told = {"sampler_id": sampler_id, "base_model": self._service.base_model, "model_path": found.path}
        return json_response(told)

    async def sample(self, request: TinkerRequest) -> Response:
        asked = request.parse(TinkerSampleRequest)
        key = request.idempotency_key
        if asked.sampling_session_id is not None:
            session = self._sessions.find(asked.sampling_session_id, request.owner)
            self._service.heartbeat(session.session_id, request.owner)
            path = session.path
            if asked.seq_id is not None:
                key = f"sample:{asked.sampling_session_id}:{asked.seq_id}"
        else:
            path = self._sampler(asked.model_path, asked.base_model, request.owner)
        request_id = self._operations.submit(
            "sample", request.owner, lambda: self._sample(asked, path, request.owner), key=key
        )
        count = max(0, min(asked.num_samples, MOST_SAMPLES))
        return json_response(
            {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{i}" for i in range(count)]}
        )

    def _sampler(self, path: str | None, base_model: str | None, owner: str) -> str | None:
        if path is not None:
            return self._service.checkpoint(path, owner).path
        if base_model != self._service.base_model:
            raise ProtocolError(f"no model {base_model!r} is served here, only {self._service.base_model!r}")
        return None

    async def _sample(self, asked: TinkerSampleRequest, path: str | None, owner: str) -> TinkerSampleResult:
        _refuse_what_is_not_offered(asked)
        prompt = text_tokens(asked.prompt.chunks, "the prompt")
        params = _params(asked.sampling_params, self._service.max_context)
        if not asked.prompt_logprobs:
            return TinkerSampleResult(await self._generate(asked, path, owner, prompt, params))
        sequences, scored = await asyncio.gather(
            self._generate(asked, path, owner, prompt, params),
            self._service.logprobs(path, owner, prompt.tolist()),
        )
        return TinkerSampleResult(sequences, _last(scored, asked.prompt_logprobs_last_n))

    async def _generate(
        self, asked: TinkerSampleRequest, path: str | None, owner: str, prompt: Ids, params: SamplingParams
    ) -> list[SampledSequence]:
        if asked.prompt_logprobs and len(prompt) == self._service.max_context:
            # Clients ask for a prompt's logprobs with one token more, for which there is no room.
            return [SampledSequence([], [], "length", "") for _ in range(asked.num_samples)]
        return await self._service.sample(path, owner, prompt.tolist(), params, asked.num_samples)


def _refuse_what_is_not_offered(asked: TinkerSampleRequest) -> None:
    if not 1 <= asked.num_samples <= MOST_SAMPLES:
        raise ProtocolError(f"num_samples is {asked.num_samples}; between 1 and {MOST_SAMPLES} are sampled")
    given = {
        "topk_prompt_logprobs": asked.topk_prompt_logprobs > 0,
        "topk_sample_logprobs": asked.topk_sample_logprobs > 0,
        "prompt_alt_tokens_k": asked.prompt_alt_tokens_k > 0,
        "target_prompt_logprobs": asked.target_prompt_logprobs is not None,
        "record_stability_info": bool(asked.record_stability_info),
    }
    if names := [name for name, is_given in given.items() if is_given]:
        raise ProtocolError(f"this server does not offer {', '.join(names)}")


def _params(given: TinkerSamplingParams, max_context: int) -> SamplingParams:
    stop: list[str | int] = [given.stop] if isinstance(given.stop, str) else given.stop or []
    if given.stop == []:
        raise ProtocolError("stop=[] asks not to stop at the end of a text, which this server always does")
    return SamplingParams(
        max_tokens=max_context if given.max_tokens is None else given.max_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=max(0, given.top_k),
        seed=given.seed,
        stop=tuple(word for word in stop if isinstance(word, str)),
        stop_token_ids=tuple(token for token in stop if isinstance(token, int)),
    )


def _last(logprobs: Floats, count: int | None) -> Floats:
    if count is None:
        return logprobs
    if not 1 <= count < len(logprobs):
        raise ProtocolError(f"prompt_logprobs_last_n is {count} for a prompt of {len(logprobs)} tokens")
    kept = logprobs.copy()
    kept[:-count] = np.nan
    return kept
