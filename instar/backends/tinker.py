"""Trains on Tinker or MinT through their SDKs.

Calls are sent in the order they are made, and their results are awaited concurrently. If a call gets no valid
response, or the service has lost the session, the call's effect is unknown. The session is then abandoned:
every later call raises BackendLost until `load_state` or `start` starts a new session.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from instar.backends.base import DEFAULT_BETA, DEFAULT_CLIP, OptimStepResult
from instar.backends.cloud import (
    NO_SESSION,
    CloudBackend,
    GradientCounter,
    read_state,
    start_session,
    translate_error,
    write_state,
)
from instar.backends.loss_values import compute_loss, get_clip_bounds, make_non_finite_error
from instar.clouds.base import CloudError
from instar.clouds.tinker import TinkerConnection
from instar.clouds.tinker_training import TinkerTrainingSession
from instar.config import AdamConfig, LossConfig, MintBackendConfig, ModelConfig, TinkerBackendConfig
from instar.errors import BackendError, BackendLost, ConfigError, NonFiniteError
from instar.models import resolve_tokenizer
from instar.types import Artifact, Floats, Ids, Sample

T = TypeVar("T")


class TinkerBackend(CloudBackend):
    def __init__(
        self, model: ModelConfig, config: TinkerBackendConfig | MintBackendConfig, *, seed: int = 0
    ) -> None:
        super().__init__(config.type, model)
        self._model = model
        self._config = config
        self.artifact_lifetime_seconds = config.sampler_ttl
        self._seed = seed
        self._submission_lock = asyncio.Lock()
        """Held while a call is sent. It is fair, so calls are sent in the order they are made."""
        self._session: TinkerTrainingSession | None = None
        self._gradient = GradientCounter()

    # --- sessions ---

    async def start(self) -> None:
        config = self._config
        trained_parts = config.model_dump(include={"train_unembed", "train_mlp", "train_attn"})

        def create(connection: TinkerConnection) -> Any:
            return connection.client.create_lora_training_client(
                base_model=connection.access.base_model, rank=config.rank, seed=self._seed, **trained_parts
            )

        await self._start_session("creating the model", create)

    async def load_state(self, path: Path, *, optimizer: bool = True) -> None:
        await self._load_saved_path(self._read_saved_path(path), optimizer=optimizer)

    async def load_adapter(self, source: str) -> None:
        await super().load_adapter(source)
        connection = self._require_session().connection
        try:
            request = connection.create_rest_client().get_weights_info_by_tinker_path(source)
            info = await connection.await_result(f"reading the settings of {source}", request)
        except CloudError as error:
            raise error.to_backend_error() from None
        base_model = connection.access.base_model
        if info.base_model != base_model:
            raise ConfigError(
                f"model.adapter: {source} was trained on {info.base_model!r}, but this run trains "
                f"{base_model!r}; set backend.base_model to {info.base_model}"
            )
        if info.lora_rank not in (None, self._config.rank):
            raise ConfigError(
                f"backend.rank: got {self._config.rank}, but {source} has rank {info.lora_rank}; set "
                f"backend.rank to {info.lora_rank}"
            )

    async def _load_saved_path(self, saved_path: str, *, optimizer: bool) -> None:
        def create(connection: TinkerConnection) -> Any:
            if optimizer:
                return connection.client.create_training_client_from_state_with_optimizer(saved_path)
            return connection.client.create_training_client_from_state(saved_path)

        await self._start_session(f"loading {saved_path}", create)

    async def _start_session(self, action: str, create: Callable[[TinkerConnection], Any]) -> None:
        async with self._submission_lock:
            self._check_open()
            if self._session is not None:
                previous, self._session = self._session, None
                await previous.end()
            if self._vocab_size is None:
                self._vocab_size = await asyncio.to_thread(_read_vocab_size, self._model.name)
            session = await start_session(lambda: self._connect(action, create))
            if self._is_closed:  # close was called while the session was starting
                await session.connection.close(finish=True)
            self._check_open()
            self._session, self._gradient = session, GradientCounter()

    async def _connect(self, action: str, create: Callable[[TinkerConnection], Any]) -> TinkerTrainingSession:
        try:
            connection = await TinkerConnection.connect(self._config, self._model)
            try:
                client = await connection.create_client(action, lambda: create(connection))
            except BaseException:  # including cancellation: the connection must not stay open
                await connection.close(finish=False)
                raise
        except CloudError as error:
            raise error.to_backend_error() from None
        return TinkerTrainingSession(connection, client)

    async def close(self) -> None:
        """Close the connection. The session then expires, because its heartbeats stop."""
        self._is_closed = True
        if self._session is not None:
            session, self._session = self._session, None
            session.mark_lost("the backend was closed")
            await session.connection.close(finish=False)

    def _require_session(self) -> TinkerTrainingSession:
        self._check_open()
        if self._session is None:
            raise BackendLost(NO_SESSION)
        if self._session.lost_reason is not None:
            raise BackendLost(self._session.lost_reason)
        return self._session

    # --- training ---

    async def _compute_logprobs(self, samples: list[Sample]) -> list[Floats]:
        async with self._submission_lock:
            response = await self._require_session().send_forward([sample.token_ids for sample in samples])
        return await _await_result(response)

    async def _compute_base_logprobs(self, samples: list[Sample]) -> list[Floats]:
        sequences = [sample.token_ids for sample in samples]
        return await _await_result(self._require_session().compute_base_logprobs(sequences))

    async def _train(self, samples: list[Sample], loss: LossConfig) -> list[Floats]:
        async with self._submission_lock:
            session, gradient = self._require_session(), self._gradient
            old_logprobs = await self._fill_old_logprobs(session, samples, loss)
            data: list[tuple[Ids, dict[str, Floats]]] = []
            for sample, logprobs in zip(samples, old_logprobs, strict=True):
                weights = np.where(sample.mask > 0, sample.mask * sample.advantages, 0)
                inputs = {"logprobs": logprobs, "advantages": weights}
                is_cross_entropy = loss.name == "cross_entropy"
                data.append((sample.token_ids, {"weights": weights} if is_cross_entropy else inputs))
            response = await session.send_forward_backward(data, loss.name, _make_loss_config(loss))
            gradient.calls += 1
        try:
            new_logprobs = await response
        except CloudError as error:
            if error.kind == "refused":
                gradient.calls -= 1
            raise translate_error(error) from None
        if not math.isfinite(compute_loss(loss, samples, new_logprobs)[0]):
            # The service cannot discard the gradient.
            session.mark_lost("the service accumulated a gradient from a non-finite loss")
            raise make_non_finite_error(loss, samples, new_logprobs)
        return new_logprobs

    async def _fill_old_logprobs(
        self, session: TinkerTrainingSession, samples: Sequence[Sample], loss: LossConfig
    ) -> list[Floats]:
        """Return the samples' logprobs with placeholders for untrained tokens, because services have no mask:
        zeros, or the current logprobs for dro, which would otherwise pull them towards zero."""
        if loss.name != "dro":
            return [np.where(sample.mask > 0, sample.logprobs, np.float32(0)) for sample in samples]
        for sample in samples:
            if not np.isin(sample.mask, (0, 1)).all():
                raise BackendError(
                    f"sample {sample.sample_key}: the mask has values other than 0 and 1, which services "
                    "do not support with the dro loss; use a different loss"
                )
        self.sent_tokens += sum(map(len, samples))
        current = await _await_result(await session.send_forward([sample.token_ids for sample in samples]))
        pairs = zip(samples, current, strict=True)
        return [np.where(sample.mask > 0, sample.logprobs, logprobs) for sample, logprobs in pairs]

    async def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        async with self._submission_lock:
            session = self._require_session()
            self._gradient.require_gradient()
            self._gradient = GradientCounter()
            response = await session.send_optim_step(adam)
        metrics = await _await_result(response)
        if "grad_norm" in metrics and not math.isfinite(metrics["grad_norm"]):
            session.mark_lost("the service may have applied a non-finite gradient")
            norm = metrics["grad_norm"]
            raise NonFiniteError(f"the gradient norm is {norm}; the service may have applied the step")
        grad_norm = metrics.pop("grad_norm", math.nan)
        return OptimStepResult.from_norm(adam, grad_norm, metrics)

    # --- artifacts and states ---

    async def publish(self, path: Path) -> Artifact:
        name, ttl = _make_unique_name(path), math.ceil(self._config.sampler_ttl)
        expires_at = time.time() + self._config.sampler_ttl
        sampler_path = await self._save(
            "publishing", lambda client: client.save_weights_for_sampler(name, ttl_seconds=ttl)
        )
        return Artifact("remote", sampler_path, expires_at)

    async def save_state(self, path: Path) -> None:
        name = _make_unique_name(path)
        saved_path = await self._save("saving the state", lambda client: client.save_state(name))
        settings = self._get_state_settings() | {"train_unembed": self._config.train_unembed}
        await write_state(path, {"state": saved_path, **settings, "saved_at": time.time()})

    async def discard_state(self, path: Path) -> None:
        connection, saved_path = self._require_session().connection, self._read_saved_path(path)
        try:
            request = connection.create_rest_client().delete_checkpoint_from_tinker_path_async(saved_path)
            await connection.await_result(f"deleting {saved_path}", request)
        except CloudError as error:
            raise BackendError(str(error)) from None

    async def _save(self, action: str, submit: Callable[[Any], Any]) -> str:
        async with self._submission_lock:
            response = self._require_session().send(action, submit)
        return str((await _await_result(response)).path)

    def _read_saved_path(self, path: Path) -> str:
        return read_state(path, "state", self._get_state_settings())

    def _get_state_settings(self) -> dict[str, Any]:
        """Return the settings that must match between a saved state and the run that loads it."""
        config = self._config
        return {
            "service": config.type,
            "base_model": config.base_model or self._model.name,
            "rank": config.rank,
            "train_attn": config.train_attn,
            "train_mlp": config.train_mlp,
        }


class MintBackend(TinkerBackend): ...


async def _await_result(response: Awaitable[T]) -> T:
    try:
        return await response
    except CloudError as error:
        raise translate_error(error) from None


def _make_loss_config(loss: LossConfig) -> dict[str, float] | None:
    if loss.name in DEFAULT_CLIP:
        low, high = get_clip_bounds(loss)
        return {"clip_low_threshold": low, "clip_high_threshold": high}
    if loss.name == "dro":
        return {"beta": DEFAULT_BETA if loss.beta is None else loss.beta}
    return None


def _make_unique_name(path: Path) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', path.name)}-{uuid.uuid4().hex[:8]}"


def _read_vocab_size(name: str) -> int | None:
    config: dict[str, Any] = json.loads((resolve_tokenizer(name) / "config.json").read_text())
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else None
