"""A training service on this machine: sessions with models and samplers that share one base model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from instar.config import ModelConfig
from instar.protocol.base import (
    AdapterSpec,
    CheckpointInfo,
    ProtocolError,
    SampledSequence,
    ServiceLimits,
    TrainingModel,
    TrainingService,
)
from instar.protocol.checkpoints import ADAPTER, CheckpointStore
from instar.protocol.cores import CoreSharing
from instar.protocol.errors import convert_errors
from instar.protocol.models import ClientSession, LocalTrainingModel, TrainingModelFactory
from instar.protocol.samplers import BASE, SamplerPool
from instar.types import Floats, SamplingParams, new_id

EXPIRY_CHECK_SECONDS = 15.0
"""The longest time between two searches for expired sessions and checkpoints."""

logger = logging.getLogger(__name__)


class LocalTrainingService(TrainingService):
    """Runs models and samplers in this process. Call `start` first. ``base_model`` is the name that clients
    use, by default the model's name. ``folder`` contains the checkpoints. ``threads`` is torch's number of
    threads in each model and each sampler."""

    def __init__(
        self,
        model: ModelConfig,
        folder: Path,
        *,
        base_model: str | None = None,
        limits: ServiceLimits | None = None,
        threads: int | None = None,
    ) -> None:
        self.base_model = base_model or model.name
        self.limits = limits or ServiceLimits()
        self._config = model
        self._threads = threads
        self._folder = folder
        self._sessions: dict[str, ClientSession] = {}
        self._models: dict[str, LocalTrainingModel] = {}
        self._models_in_creation = 0
        self._expiry_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the base model. Raises ConfigError if the folder is in use or the model cannot be loaded."""
        self._checkpoints = CheckpointStore(self._folder)
        try:
            await self._load()
        except BaseException:  # also when cancelled: the folder must not stay locked
            self._checkpoints.close()
            raise
        self._expiry_task = asyncio.create_task(self._remove_expired())

    async def _load(self) -> None:
        self._factory = await asyncio.to_thread(TrainingModelFactory, self._config, self._threads)
        self._samplers = await asyncio.to_thread(
            SamplerPool,
            self._config,
            self._factory.base,
            max_engines=self.limits.max_samplers,
            threads=self._threads,
        )
        self._cores = CoreSharing(self._samplers.set_cores)
        self.max_context = self._samplers.info.max_context
        self.vocab_size = self._samplers.info.vocab_size
        self.tokenizer_path = str(self._samplers.folder)

    # --- sessions ---

    async def create_session(self, owner: str) -> str:
        session_id = new_id("session")
        self._sessions[session_id] = ClientSession(session_id, owner, time.monotonic())
        return session_id

    def heartbeat(self, session_id: str, owner: str) -> None:
        self._find_session(session_id, owner)

    def _find_session(self, session_id: str, owner: str) -> ClientSession:
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise ProtocolError(f"there is no session {session_id}, or it has ended", 404)
        session.last_seen = time.monotonic()
        return session

    async def end_session(self, session_id: str, owner: str) -> None:
        self.heartbeat(session_id, owner)
        await self._end_session(session_id)

    async def _end_session(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        ending = [model for model in self._models.values() if model.session_id == session_id]
        await asyncio.gather(*(self._end(model) for model in ending))

    async def _end(self, model: LocalTrainingModel) -> None:
        self._models.pop(model.model_id, None)
        await model.end()

    # --- models ---

    async def create_model(
        self, session_id: str, owner: str, base_model: str, adapter: AdapterSpec
    ) -> TrainingModel:
        session = self._find_session(session_id, owner)
        self._check_new_model(base_model, adapter)
        await self._evict_idle_sessions()
        self._models_in_creation += 1
        try:
            with convert_errors():
                backend, adapter = await asyncio.to_thread(self._factory.create_backend, adapter)
        finally:
            self._models_in_creation -= 1
        model = LocalTrainingModel(
            backend,
            self._checkpoints,
            session=session,
            base_model=self.base_model,
            adapter=adapter,
            max_context=self.max_context,
            cores=self._cores,
        )
        if session_id not in self._sessions:
            await model.end()
            raise ProtocolError(f"the session {session_id} ended while the model was created", 404)
        self._models[model.model_id] = model
        return model

    def _check_new_model(self, base_model: str, adapter: AdapterSpec) -> None:
        limits = self.limits
        if base_model not in (self.base_model, self._config.name):
            raise ProtocolError(f"base_model: {base_model!r} is not served here; {self.base_model!r} is")
        if not 1 <= adapter.rank <= limits.max_rank:
            raise ProtocolError(f"rank: received {adapter.rank}; allowed: 1 to {limits.max_rank}")
        if adapter.seed is not None and not -(2**63) <= adapter.seed < 2**63:
            raise ProtocolError(f"seed: {adapter.seed} does not fit 64 bits")

    async def _evict_idle_sessions(self) -> None:
        """End sessions without a heartbeat until there is room for a model. Raises ProtocolError 429 if all
        sessions are alive."""
        most = self.limits.max_models
        while len(self._models) + self._models_in_creation >= most:
            holding = {model.session_id for model in self._models.values()}
            quiet = min(holding, key=lambda each: self._sessions[each].last_seen, default=None)
            if (
                quiet is None
                or time.monotonic() - self._sessions[quiet].last_seen < self.limits.idle_before_eviction
            ):
                raise ProtocolError(f"{most} models are in training, which is the limit: end one first", 429)
            await self._end_session(quiet)

    def model(self, model_id: str, owner: str) -> TrainingModel:
        return self._model(model_id, owner)

    def _model(self, model_id: str, owner: str) -> LocalTrainingModel:
        model = self._models.get(model_id)
        if model is None or model.owner != owner:
            raise ProtocolError(f"there is no model {model_id}, or it has ended", 404)
        self.heartbeat(model.session_id, owner)
        return model

    async def end_model(self, model_id: str, owner: str) -> None:
        await self._end(self._model(model_id, owner))

    # --- sampling ---

    async def sample(
        self, sampler: str | None, owner: str, prompt: Sequence[int], params: SamplingParams, count: int
    ) -> list[SampledSequence]:
        if not 1 <= count <= self.limits.max_operations:
            raise ProtocolError(
                f"number of samples: received {count}; allowed: 1 to {self.limits.max_operations}"
            )
        key, adapter = self._resolve_policy(sampler, owner)
        with convert_errors(), self._cores.reserve_for_sampling():
            return await self._samplers.sample(key, adapter, prompt, params, count)

    async def logprobs(self, sampler: str | None, owner: str, tokens: Sequence[int]) -> Floats:
        key, adapter = self._resolve_policy(sampler, owner)
        with convert_errors(), self._cores.reserve_for_sampling():
            return await self._samplers.logprobs(key, adapter, tokens)

    def _resolve_policy(self, sampler: str | None, owner: str) -> tuple[str, Path | None]:
        """Return the key and the folder of a sampler's weights. Both refer to the base model if there is no
        sampler."""
        if sampler is None:
            return BASE, None
        info = self._checkpoints.find(sampler, owner)
        # A checkpoint that replaces another at the same path is a different policy.
        return f"{info.path} {info.created_at}", self._checkpoints.folder(info) / ADAPTER

    # --- checkpoints ---

    def checkpoint(self, path: str, owner: str) -> CheckpointInfo:
        return self._checkpoints.find(path, owner)

    def checkpoints(self, owner: str, model_id: str | None = None) -> list[CheckpointInfo]:
        return self._checkpoints.list_checkpoints(owner, model_id)

    def delete_checkpoint(self, path: str, owner: str) -> None:
        self._checkpoints.delete(path, owner)

    # --- expiry ---

    async def _remove_expired(self) -> None:
        while True:
            await asyncio.sleep(min(EXPIRY_CHECK_SECONDS, self.limits.session_ttl / 4))
            oldest = time.monotonic() - self.limits.session_ttl
            for session_id in [i for i, session in self._sessions.items() if session.last_seen < oldest]:
                logger.info("ended session %s: no heartbeat for %g s", session_id, self.limits.session_ttl)
                await self._end_session(session_id)
            try:
                self._checkpoints.remove_expired()
            except OSError as error:  # expired ones are already hidden, and the next round tries again
                logger.warning("cannot remove expired checkpoints: %s", error)

    async def close(self) -> None:
        """End all sessions. Checkpoints are kept."""
        if self._expiry_task is None:
            return
        self._expiry_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._expiry_task
        self._expiry_task = None
        for session_id in list(self._sessions):
            await self._end_session(session_id)
        await self._samplers.close()
        self._checkpoints.close()
