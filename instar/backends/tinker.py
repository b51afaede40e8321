"""Train on Tinker or MinT through their SDKs.

Calls are sent in the order in which they are made, and their results are awaited concurrently. The session is
abandoned if the effect of a call on the service is unknown, because there was no response or no session.
Every later call then raises BackendLost, and `load_state` or `start` starts a new session.
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

from instar.backends.base import (
    DEFAULT_BETA,
    DEFAULT_CLIP,
    Backend,
    BackendCapabilities,
    ForwardBackwardResult,
    OptimStepResult,
    cloud_capabilities,
)
from instar.backends.check import check_samples, nan_logprobs, select_scorable, select_trained
from instar.backends.loss_values import clip_bounds, compute_loss, non_finite_error
from instar.backends.service import (
    NO_SESSION,
    GradientCounter,
    read_state,
    start_session,
    translate_error,
    write_state,
)
from instar.clouds.base import SERVICES, CloudError
from instar.clouds.tinker import TinkerConnection
from instar.clouds.tinker_training import TinkerTrainingSession
from instar.config import AdamConfig, LossConfig, MintBackendConfig, ModelConfig, TinkerBackendConfig
from instar.errors import BackendError, BackendLost, NonFiniteError
from instar.models import resolve_tokenizer
from instar.types import Artifact, Floats, Ids, Sample

T = TypeVar("T")


class TinkerBackend(Backend):
    def __init__(
        self, model: ModelConfig, config: TinkerBackendConfig | MintBackendConfig, *, seed: int = 0
    ) -> None:
        self._model = model
        self._config = config
        self._seed = seed
        self._vocab_size: int | None = None
        self._submission_lock = asyncio.Lock()
        """Held while a call is sent. The lock serves its waiters in turn, so that calls keep their order."""
        self._session: TinkerTrainingSession | None = None
        self._gradient = GradientCounter()
        self._is_closed = False

    @property
    def capabilities(self) -> BackendCapabilities:
        return cloud_capabilities(SERVICES[self._config.type].losses)

    # --- sessions --------------------------------------------------------------------------------

    async def start(self) -> None:
        config = self._config

        def create(connection: TinkerConnection) -> Any:
            return connection.client.create_lora_training_client(
                base_model=connection.access.base_model,
                rank=config.rank,
                seed=self._seed,
                train_mlp=config.train_mlp,
                train_attn=config.train_attn,
                train_unembed=config.train_unembed,
            )

        await self._start_session("creating the model", create)

    async def load_state(self, path: Path, *, optimizer: bool = True) -> None:
        saved = self._read_state(path)

        def create(connection: TinkerConnection) -> Any:
            if optimizer:
                return connection.client.create_training_client_from_state_with_optimizer(saved)
            return connection.client.create_training_client_from_state(saved)

        await self._start_session(f"loading {saved}", create)

    async def _start_session(self, action: str, create: Callable[[TinkerConnection], Any]) -> None:
        async with self._submission_lock:
            self._check_open()
            if self._session is not None:
                previous, self._session = self._session, None
                await previous.abandon()
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
                # The SDK blocks while it creates a client.
                client = await connection.run_in_thread(action, lambda: create(connection))
            except BaseException:  # including cancellation: the connection must not stay open
                await connection.close(finish=False)
                raise
        except CloudError as error:
            raise error.to_backend_error() from None
        return TinkerTrainingSession(connection, client)

    async def close(self) -> None:
        """Close the connection. The service ends the session when it receives no more requests."""
        self._is_closed = True
        if self._session is not None:
            session, self._session = self._session, None
            session.lost_reason = session.lost_reason or "the backend was closed"
            await session.connection.close(finish=False)

    def _check_open(self) -> None:
        if self._is_closed:
            raise BackendError("the backend is closed")

    def _live_session(self) -> TinkerTrainingSession:
        self._check_open()
        if self._session is None:
            raise BackendLost(NO_SESSION)
        if self._session.lost_reason is not None:
            raise BackendLost(self._session.lost_reason)
        return self._session

    # --- training --------------------------------------------------------------------------------

    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        return await self._compute_logprobs(samples, use_base_model=False)

    async def reference_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        return await self._compute_logprobs(samples, use_base_model=True)

    async def _compute_logprobs(self, samples: Sequence[Sample], *, use_base_model: bool) -> list[Floats]:
        self._check_open()
        check_samples(samples, self._vocab_size, self._model.max_context)
        results = nan_logprobs(samples)
        scorable = select_scorable(samples)
        sequences = [samples[i].token_ids for i in scorable]
        if not scorable:
            return results
        if use_base_model:
            result = self._live_session().base_logprobs(sequences)
        else:
            async with self._submission_lock:
                result = await self._live_session().send_forward(sequences)
        for i, logprobs in zip(scorable, await _await_result(result), strict=True):
            results[i] = logprobs
        return results

    async def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        self._check_open()
        check_samples(samples, self._vocab_size, self._model.max_context, loss)
        results = nan_logprobs(samples)
        trained = select_trained(samples)
        if trained:
            new_logprobs = await self._train([samples[i] for i in trained], loss)
            for i, logprobs in zip(trained, new_logprobs, strict=True):
                results[i] = np.where(samples[i].mask > 0, logprobs, np.nan).astype(np.float32)
        value, metrics = compute_loss(loss, samples, results)
        return ForwardBackwardResult(value, results, metrics)

    async def _train(self, samples: Sequence[Sample], loss: LossConfig) -> list[Floats]:
        async with self._submission_lock:
            session, gradient = self._live_session(), self._gradient
            old_logprobs = await self._complete_old_logprobs(session, samples, loss)
            data: list[tuple[Ids, dict[str, Floats]]] = []
            for sample, logprobs in zip(samples, old_logprobs, strict=True):
                weights = np.where(sample.mask > 0, sample.mask * sample.advantages, 0)
                if loss.name == "cross_entropy":
                    data.append((sample.token_ids, {"weights": weights}))
                else:
                    data.append((sample.token_ids, {"logprobs": logprobs, "advantages": weights}))
            result = await session.send_forward_backward(data, loss.name, _loss_config(loss))
            gradient.calls += 1
        try:
            new_logprobs = await result
        except CloudError as error:
            if error.kind == "refused":
                gradient.calls -= 1
            raise translate_error(error) from None
        if not math.isfinite(compute_loss(loss, samples, new_logprobs)[0]):
            # The service has already added the gradient and cannot remove it.
            session.lost_reason = "the service's gradient contains a loss that is not finite"
            raise non_finite_error(loss, samples, new_logprobs)
        return new_logprobs

    async def _complete_old_logprobs(
        self, session: TinkerTrainingSession, samples: Sequence[Sample], loss: LossConfig
    ) -> list[Floats]:
        """Return the samples' logprobs, with other values for the tokens that are not trained, because a
        service has no mask. These values are zeros. For the dro loss they are the current logprobs, because
        dro would move the tokens' logprobs towards zero."""
        if loss.name != "dro":
            return [np.where(sample.mask > 0, sample.logprobs, np.float32(0)) for sample in samples]
        for sample in samples:
            if not np.isin(sample.mask, (0, 1)).all():
                raise BackendError(
                    f"sample {sample.sample_key}: with the dro loss, the mask may contain only 0 and 1"
                )
        current = await _await_result(await session.send_forward([sample.token_ids for sample in samples]))
        pairs = zip(samples, current, strict=True)
        return [np.where(sample.mask > 0, sample.logprobs, logprobs) for sample, logprobs in pairs]

    async def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        async with self._submission_lock:
            session = self._live_session()
            self._gradient.require_gradient()
            self._gradient = GradientCounter()
            result = await session.send_optim_step(adam)
        metrics = await _await_result(result)
        grad_norm = metrics.pop("grad_norm", None)
        if grad_norm is None:
            return OptimStepResult.from_norm(adam, math.nan, metrics)
        if not math.isfinite(grad_norm):
            session.lost_reason = "the service may have applied a gradient that is not finite"
            raise NonFiniteError(f"the gradient norm is {grad_norm}")
        return OptimStepResult.from_norm(adam, grad_norm, metrics)

    # --- artifacts and states ----------------------------------------------------------------------

    async def publish(self, path: Path) -> Artifact:
        seconds = self._config.sampler_ttl
        expires_at = time.time() + seconds
        saved = await self._save(
            "publishing",
            lambda client: client.save_weights_for_sampler(
                _unique_name(path), ttl_seconds=math.ceil(seconds)
            ),
        )
        return Artifact("remote", saved, expires_at)

    async def save_state(self, path: Path) -> None:
        name = await self._save("saving the state", lambda client: client.save_state(_unique_name(path)))
        settings = self._state_settings() | {"train_unembed": self._config.train_unembed}
        await write_state(path, {"state": name, **settings, "saved_at": time.time()})

    async def discard_state(self, path: Path) -> None:
        connection, saved = self._live_session().connection, self._read_state(path)
        try:
            deletion = connection.rest_client().delete_checkpoint_from_tinker_path_async(saved)
            await connection.await_result(f"deleting {saved}", deletion)
        except CloudError as error:
            raise BackendError(str(error)) from None

    async def _save(self, action: str, submit: Callable[[Any], Any]) -> str:
        """Send a call that saves weights or a state, and return the path on the service."""
        async with self._submission_lock:
            result = self._live_session().send(action, submit)
        return str((await _await_result(result)).path)

    def _read_state(self, path: Path) -> str:
        return read_state(path, "state", self._state_settings())

    def _state_settings(self) -> dict[str, Any]:
        """Return the settings that must be equal in a saved state and in the run that loads it."""
        config = self._config
        return {
            "service": config.type,
            "base_model": config.base_model or self._model.name,
            "rank": config.rank,
            "train_attn": config.train_attn,
            "train_mlp": config.train_mlp,
        }


class MintBackend(TinkerBackend): ...


async def _await_result(result: Awaitable[T]) -> T:
    try:
        return await result
    except CloudError as error:
        raise translate_error(error) from None


def _loss_config(loss: LossConfig) -> dict[str, float] | None:
    if loss.name in DEFAULT_CLIP:
        low, high = clip_bounds(loss)
        return {"clip_low_threshold": low, "clip_high_threshold": high}
    if loss.name == "dro":
        return {"beta": DEFAULT_BETA if loss.beta is None else loss.beta}
    return None


def _unique_name(path: Path) -> str:
    """Return a name that is unique on the service, because the same path may be saved again."""
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', path.name)}-{uuid.uuid4().hex[:8]}"


def _read_vocab_size(name: str) -> int | None:
    config: dict[str, Any] = json.loads((resolve_tokenizer(name) / "config.json").read_text())
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else None
