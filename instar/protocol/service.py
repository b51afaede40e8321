"""The workshop on this machine: sessions and what belongs to them, over one copy of the base weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from instar.protocol.models import LocalTrainingModel, TrainingModelFactory
from instar.protocol.samplers import BASE, SamplerPool
from instar.types import Floats, SamplingParams, new_id

EXPIRY_CHECK_SECONDS = 15.0
"""Most seconds between two looks for sessions and checkpoints that have expired."""

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Session:
    owner: str
    seen: float


class LocalTrainingService(TrainingService):
    """``base_model`` is the name that clients ask for; by default the model's own. ``folder`` keeps the
    checkpoints. ``threads`` are torch's, in each model and each sampler. `start` comes first."""

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
        self._sessions: dict[str, _Session] = {}
        self._models: dict[str, LocalTrainingModel] = {}
        self._making = 0
        self._housekeeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the base model. Raises ConfigError when the folder is in use, or the model cannot be had."""
        self._checkpoints = CheckpointStore(self._folder)
        try:
            await self._load()
        except BaseException:
            self._checkpoints.close()
            raise
        self._housekeeper = asyncio.create_task(self._keep_house())

    async def _load(self) -> None:
        self._maker = await asyncio.to_thread(TrainingModelFactory, self._config, self._threads)
        self._samplers = await asyncio.to_thread(
            SamplerPool,
            self._config,
            self._maker.base,
            most=self.limits.max_samplers,
            threads=self._threads,
        )
        self._cores = CoreSharing(self._samplers.use_cores)
        self.max_context = self._samplers.info.max_context
        self.vocab_size = self._samplers.info.vocab_size
        self.tokenizer_path = str(self._samplers.folder)

    # --- sessions ---

    async def create_session(self, owner: str) -> str:
        session_id = new_id("session")
        self._sessions[session_id] = _Session(owner, time.monotonic())
        return session_id

    def heartbeat(self, session_id: str, owner: str) -> None:
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise ProtocolError(f"there is no session {session_id}, or it has ended", 404)
        session.seen = time.monotonic()

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
        self.heartbeat(session_id, owner)
        self._check_new(base_model, adapter)
        await self._make_room()
        self._making += 1
        try:
            with convert_errors():
                backend, adapter = await asyncio.to_thread(self._maker.make, adapter)
        finally:
            self._making -= 1
        model = LocalTrainingModel(
            backend,
            self._checkpoints,
            owner=owner,
            session_id=session_id,
            base_model=self.base_model,
            adapter=adapter,
            max_context=self.max_context,
            cores=self._cores,
        )
        if session_id not in self._sessions:
            await model.end()
            raise ProtocolError(f"the session {session_id} ended while the model was made", 404)
        self._models[model.model_id] = model
        return model

    def _check_new(self, base_model: str, adapter: AdapterSpec) -> None:
        limits = self.limits
        if base_model not in (self.base_model, self._config.name):
            raise ProtocolError(f"{base_model!r} is not served here: {self.base_model!r} is")
        if not 1 <= adapter.rank <= limits.max_rank:
            raise ProtocolError(f"a rank from 1 to {limits.max_rank} is taken, not {adapter.rank}")
        if adapter.seed is not None and not -(2**63) <= adapter.seed < 2**63:
            raise ProtocolError(f"the seed {adapter.seed} does not fit into 64 bits")

    async def _make_room(self) -> None:
        """Where all places are taken, a session whose client has gone without a word gives up its own."""
        most = self.limits.max_models
        while len(self._models) + self._making >= most:
            holding = {model.session_id for model in self._models.values()}
            quiet = min(holding, key=lambda each: self._sessions[each].seen, default=None)
            if (
                quiet is None
                or time.monotonic() - self._sessions[quiet].seen < self.limits.idle_before_eviction
            ):
                raise ProtocolError(f"{most} models are in training, which is the most: end one first", 429)
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
                f"from 1 to {self.limits.max_operations} replies may be asked for, not {count}"
            )
        key, adapter = self._policy(sampler, owner)
        with convert_errors(), self._cores.sampling():
            return await self._samplers.sample(key, adapter, prompt, params, count)

    async def logprobs(self, sampler: str | None, owner: str, tokens: Sequence[int]) -> Floats:
        key, adapter = self._policy(sampler, owner)
        with convert_errors(), self._cores.sampling():
            return await self._samplers.logprobs(key, adapter, tokens)

    def _policy(self, sampler: str | None, owner: str) -> tuple[str, Path | None]:
        """A name for the weights, and their folder."""
        if sampler is None:
            return BASE, None
        info = self._checkpoints.find(sampler, owner)
        # One that was replaced under the same path is another policy.
        return f"{info.path} {info.created_at}", self._checkpoints.folder(info) / ADAPTER

    # --- checkpoints ---

    def checkpoint(self, path: str, owner: str) -> CheckpointInfo:
        return self._checkpoints.find(path, owner)

    def checkpoints(self, owner: str, model_id: str | None = None) -> list[CheckpointInfo]:
        return self._checkpoints.list_checkpoints(owner, model_id)

    def delete_checkpoint(self, path: str, owner: str) -> None:
        self._checkpoints.delete(path, owner)

    # --- time passes ---

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(min(EXPIRY_CHECK_SECONDS, self.limits.session_ttl / 4))
            oldest = time.monotonic() - self.limits.session_ttl
            for session_id in [i for i, session in self._sessions.items() if session.seen < oldest]:
                log.info("session %s sent no heartbeat for %g s: ended", session_id, self.limits.session_ttl)
                await self._end_session(session_id)
            try:
                self._checkpoints.remove_expired()
            except OSError as error:  # they are not found any more, and removed when the disk lets us
                log.warning("expired checkpoints could not be removed: %s", error)

    async def close(self) -> None:
        """Checkpoints stay."""
        if self._housekeeper is None:
            return
        self._housekeeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._housekeeper
        self._housekeeper = None
        for session_id in list(self._sessions):
            await self._end_session(session_id)
        await self._samplers.close()
        self._checkpoints.close()
