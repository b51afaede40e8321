"""A training service in this process: sessions with models and samplers that share one base model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from instar.backends.local.check import check_architecture
from instar.backends.local.model import load_base
from instar.config import ModelConfig
from instar.protocol.base import AdapterSpec, ProtocolError, SampledSequence, ServiceLimits, convert_errors
from instar.protocol.checkpoints import ADAPTER_FOLDER, CheckpointStore
from instar.protocol.models import ClientSession, CoreSharing, ModelIdentity, TrainingModel, create_backend
from instar.protocol.samplers import BASE_MODEL_KEY, SamplerPool
from instar.types import Floats, SamplingParams, new_id

EXPIRY_CHECK_INTERVAL_SECONDS = 15.0
"""The maximum interval between checks for expired sessions and checkpoints."""

logger = logging.getLogger(__name__)


class TrainingService:
    """Runs models and samplers in this process. Call `start` first.

    ``base_model`` is the model name that clients use, by default the configured name. Checkpoints are stored
    in ``folder``. ``threads`` is the number of torch threads per model and sampler; if it is None, they share
    the cores as described in `CoreSharing`. An ``owner`` is the hash of a client's API key.
    """

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
        self._model_config = model
        self._threads = threads
        self._folder = folder
        self._sessions: dict[str, ClientSession] = {}
        self._models: dict[str, TrainingModel] = {}
        self._models_being_created = 0
        self._expiry_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the base model. Raises ConfigError if that fails or another server uses the folder."""
        self.checkpoints = CheckpointStore(self._folder)
        try:
            await asyncio.to_thread(check_architecture, self._model_config)
            self._base = await asyncio.to_thread(load_base, self._model_config)
            self._sampler_pool = await asyncio.to_thread(
                SamplerPool,
                self._model_config,
                self._base,
                max_engines=self.limits.max_samplers,
                threads=self._threads,
            )
        except BaseException:  # also when cancelled: the folder must not stay locked
            self.checkpoints.close()
            raise
        self._core_sharing = CoreSharing(self._sampler_pool.set_cores)
        self.max_context = self._sampler_pool.info.max_context
        self.vocab_size = self._sampler_pool.info.vocab_size
        self.tokenizer_path = str(self._sampler_pool.folder)
        self._expiry_task = asyncio.create_task(self._remove_expired())

    # --- sessions ---

    async def create_session(self, owner: str) -> str:
        session_id = new_id("session")
        self._sessions[session_id] = ClientSession(session_id, owner, time.monotonic())
        return session_id

    def heartbeat(self, session_id: str, owner: str) -> None:
        """Record a heartbeat. Raises ProtocolError 404 if the session does not exist."""
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise ProtocolError(f"session {session_id} does not exist or has ended", 404)
        session.last_seen = time.monotonic()

    async def end_session(self, session_id: str, owner: str) -> None:
        self.heartbeat(session_id, owner)  # raises if the session does not exist
        await self._end_session(session_id)

    async def _end_session(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        model_ids = [model.model_id for model in self._models.values() if model.session_id == session_id]
        await asyncio.gather(*[self._models.pop(model_id).close() for model_id in model_ids])

    # --- models ---

    async def create_model(
        self, session_id: str, owner: str, base_model: str, adapter: AdapterSpec, model_id: str | None = None
    ) -> TrainingModel:
        """Create a model, by default with a new id. Raises ProtocolError 400 (invalid), 404 (no session), 409
        (the id is in use) or 429 (too many models)."""
        self.heartbeat(session_id, owner)
        if model_id in self._models:
            raise ProtocolError(f"model {model_id} already exists; use a different model_seq_id", 409)
        self._check_new_model(base_model, adapter)
        await self._evict_idle_sessions()
        self._models_being_created += 1
        try:
            with convert_errors():
                backend, adapter = await asyncio.to_thread(
                    create_backend, self._base, self._model_config, adapter, self._threads
                )
        finally:
            self._models_being_created -= 1
        model = TrainingModel(
            backend,
            self.checkpoints,
            identity=ModelIdentity(model_id or new_id("model"), session_id, owner, self.base_model),
            adapter=adapter,
            max_context=self.max_context,
            core_sharing=self._core_sharing,
        )
        if session_id not in self._sessions:
            await model.close()
            raise ProtocolError(f"session {session_id} ended while the model was being created", 404)
        self._models[model.model_id] = model
        return model

    def _check_new_model(self, base_model: str, adapter: AdapterSpec) -> None:
        if base_model not in (self.base_model, self._model_config.name):
            raise ProtocolError(f"unknown base_model {base_model!r}; this server serves {self.base_model!r}")
        if not 1 <= adapter.rank <= self.limits.max_rank:
            raise ProtocolError(f"rank must be between 1 and {self.limits.max_rank}, got {adapter.rank}")
        if adapter.seed is not None and not -(2**63) <= adapter.seed < 2**63:
            raise ProtocolError(f"seed must be a signed 64-bit integer, got {adapter.seed}")

    async def _evict_idle_sessions(self) -> None:
        """End idle sessions until one more model fits. Raises ProtocolError 429 if too few are idle."""
        limit = self.limits.max_models
        while len(self._models) + self._models_being_created >= limit:
            sessions = [self._sessions[model.session_id] for model in self._models.values()]
            idlest = min(sessions, key=lambda session: session.last_seen, default=None)
            if idlest is None or time.monotonic() - idlest.last_seen < self.limits.eviction_idle_seconds:
                raise ProtocolError(f"too many models are in training (limit: {limit}); close one first", 429)
            await self._end_session(idlest.session_id)

    def find_model(self, model_id: str, owner: str) -> TrainingModel:
        """Return a model and record a heartbeat. Raises ProtocolError 404 if it does not exist."""
        model = self._models.get(model_id)
        if model is None or model.owner != owner:
            raise ProtocolError(f"model {model_id} does not exist or was closed", 404)
        self.heartbeat(model.session_id, owner)
        return model

    async def close_model(self, model_id: str, owner: str) -> None:
        model = self.find_model(model_id, owner)
        del self._models[model_id]
        await model.close()

    # --- sampling ---

    async def sample(
        self, sampler_path: str | None, owner: str, prompt: Sequence[int], params: SamplingParams, count: int
    ) -> list[SampledSequence]:
        """Sample ``count`` sequences from the checkpoint at ``sampler_path`` (None: the base model)."""
        limit = self.limits.max_operations
        if not 1 <= count <= limit:
            raise ProtocolError(f"num_samples must be between 1 and {limit}, got {count}")
        key, adapter = self._resolve_policy(sampler_path, owner)
        with convert_errors(), self._core_sharing.reserve_for_sampling():
            return await self._sampler_pool.sample(key, adapter, prompt, params, count)

    async def compute_logprobs(self, sampler_path: str | None, owner: str, tokens: Sequence[int]) -> Floats:
        """Return the logprob of every token (NaN at index 0). If the path is None, use the base model."""
        key, adapter = self._resolve_policy(sampler_path, owner)
        with convert_errors(), self._core_sharing.reserve_for_sampling():
            return await self._sampler_pool.compute_logprobs(key, adapter, tokens)

    def _resolve_policy(self, sampler_path: str | None, owner: str) -> tuple[str, Path | None]:
        """Return the policy's key and its adapter folder, which is None for the base model."""
        if sampler_path is None:
            return BASE_MODEL_KEY, None
        info = self.checkpoints.find(sampler_path, owner)
        # The key contains the time, because a path can be overwritten with different weights.
        return f"{info.path} {info.created_at}", self.checkpoints.get_folder(info) / ADAPTER_FOLDER

    # --- expiry ---

    async def _remove_expired(self) -> None:
        while True:
            await asyncio.sleep(min(EXPIRY_CHECK_INTERVAL_SECONDS, self.limits.session_ttl / 4))
            cutoff = time.monotonic() - self.limits.session_ttl
            for session_id in [i for i, session in self._sessions.items() if session.last_seen < cutoff]:
                logger.info("ending session %s: no heartbeat for %g s", session_id, self.limits.session_ttl)
                await self._end_session(session_id)
            try:
                self.checkpoints.remove_expired()
            except OSError as error:  # expired checkpoints are already hidden, and the next round retries
                logger.warning("cannot remove expired checkpoints: %s", error)

    async def close(self) -> None:
        """End all sessions and close the samplers. Checkpoints are kept."""
        if self._expiry_task is None:
            return
        self._expiry_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._expiry_task
        self._expiry_task = None
        for session_id in list(self._sessions):
            await self._end_session(session_id)
        await self._sampler_pool.close()
        self.checkpoints.close()
