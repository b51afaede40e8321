"""Train on Weaver, or on another server with the same protocol. Every session has one model."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from weaver import AsyncSamplingClient, AsyncTrainingClient
from weaver.types import AdamParams, LoraConfig

from instar.backends.base import (
    Backend,
    BackendCapabilities,
    ForwardBackwardResult,
    OptimStepResult,
    cloud_capabilities,
)
from instar.backends.check import check_samples, nan_logprobs, select_scorable, select_trained
from instar.backends.loss_values import compute_loss, non_finite_error
from instar.backends.service import NO_SESSION, read_state, start_session, write_state
from instar.backends.weaver_model import WeaverModel
from instar.clouds.base import SERVICES, CloudAccess, CloudError, resolve_access
from instar.clouds.weaver import (
    WeaverCallPolicy,
    WeaverClient,
    build_forward_datum,
    build_training_datum,
    extract_metrics,
    fetch_prompt_logprobs,
)
from instar.config import AdamConfig, LossConfig, ModelConfig, WeaverBackendConfig
from instar.errors import BackendError, BackendLost, NonFiniteError
from instar.types import Artifact, Floats, Sample

T = TypeVar("T")

STATE_FORMAT = 1
MAX_CONCURRENT_SCORES = 16
"""The number of concurrent requests for the base model's logprobs."""
END_TIMEOUT_SECONDS = 5.0


class WeaverBackend(Backend):
    def __init__(self, model: ModelConfig, section: WeaverBackendConfig, *, seed: int = 0) -> None:
        self._section = section
        self._max_tokens = model.max_context
        self._seed = seed
        self._access: CloudAccess = resolve_access(section, model)
        self._call_policy = WeaverCallPolicy(self._access)
        self._session_lock = asyncio.Lock()
        """Held while a session is replaced. The lock serves its waiters in turn, so calls keep their
        order."""
        self._model: WeaverModel | None = None
        self._reference: AsyncSamplingClient | None = None
        self._is_closed = False

    @property
    def capabilities(self) -> BackendCapabilities:
        return cloud_capabilities(SERVICES["weaver"].losses)

    async def start(self) -> None:
        async with self._session_lock:
            self._model = await self._replace_model()

    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        model = await self._get_model()
        check_samples(samples, None, self._max_tokens)
        results = nan_logprobs(samples)
        scorable = select_scorable(samples)
        if scorable:
            data = [build_forward_datum(samples[index]) for index in scorable]
            rows = await model.compute_logprobs("forward", data, "forward_logprob")
            for index, row in zip(scorable, rows, strict=True):
                results[index][1:] = row
        return results

    async def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        model = await self._get_model()
        check_samples(samples, None, self._max_tokens, loss)
        results = nan_logprobs(samples)
        trained = select_trained(samples)
        if trained:
            data = [build_training_datum(samples[index], loss) for index in trained]
            with model.count_gradient():
                rows = await model.compute_logprobs("forward_backward", data, loss.name)
            for index, row in zip(trained, rows, strict=True):
                is_trained = samples[index].mask > 0
                results[index][is_trained] = row[is_trained[1:]]
        value, metrics = compute_loss(loss, samples, results)
        if not math.isfinite(value):
            model.end("the service's gradient is not finite")
            raise non_finite_error(loss, samples, results)
        return ForwardBackwardResult(value, results, metrics)

    async def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        model = await self._get_model()
        model.consume_gradient()
        params = AdamParams(
            learning_rate=adam.lr,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            grad_clip_norm=adam.grad_clip_norm,
        )
        result = await model.call("optim_step", lambda: model.client.optim_step(params, wait=False))
        grad_norm = extract_metrics(result).get("grad_norm", math.nan)
        if math.isinf(grad_norm):
            model.end("the service may have applied a gradient that is not finite")
            raise NonFiniteError(f"the gradient norm is {grad_norm}")
        return OptimStepResult.from_norm(adam, grad_norm)

    async def publish(self, path: Path) -> Artifact:
        model = await self._get_model()
        started, name, ttl = time.time(), model.make_name(path.name), math.ceil(self._section.sampler_ttl)
        result = await model.call(
            "publish",
            lambda: model.client.save_weights_for_sampler(name=name, ttl_seconds=ttl, wait=False),
        )
        fields = cast(dict[str, Any], result) if isinstance(result, dict) else {}
        if not (sampler := fields.get("model_path") or fields.get("path")):
            raise BackendError("publish: the response of Weaver has neither model_path nor path")
        return Artifact("remote", str(sampler), expires_at=started + ttl)

    async def save_state(self, path: Path) -> None:
        model = await self._get_model()
        name = model.make_name("state")
        saved = await model.call_exclusively(
            "save_state",
            lambda: model.client.save_state(name=name, checkpoint_type="weight_and_optimizer"),
        )
        await write_state(path, {"path": saved.path, **self._state_settings()})

    async def load_state(self, path: Path, *, optimizer: bool = True) -> None:
        saved = read_state(path, "path", self._state_settings())
        async with self._session_lock:
            model = await self._replace_model()
            try:
                await model.load(saved, optimizer=optimizer)
            except BaseException:  # including cancellation: the service should not keep the model
                await _end_model(model)
                raise
            self._model = model

    async def reference_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        check_samples(samples, None, self._max_tokens)
        service = (await self._get_model()).service
        if self._reference is None:
            self._reference = await self._call(
                "reference_logprobs",
                lambda: service.create_sampling_client(base_model=self._access.base_model),
            )
        client, slots = self._reference, asyncio.Semaphore(MAX_CONCURRENT_SCORES)

        async def score(sample: Sample) -> Floats:
            if len(sample) < 2:
                return np.full(len(sample), np.nan, np.float32)
            async with slots:
                return await self._call(
                    "reference_logprobs", lambda: fetch_prompt_logprobs(client, sample.token_ids)
                )

        tasks = [asyncio.ensure_future(score(sample)) for sample in samples]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def close(self) -> None:
        self._is_closed = True
        async with self._session_lock:
            if self._model is not None:
                await self._model.service.aclose()
                self._model = None

    # --- sessions ----------------------------------------------------------------------------------

    async def _get_model(self) -> WeaverModel:
        async with self._session_lock:
            self._check_open()
            if self._model is None:
                raise BackendLost(NO_SESSION)
            return self._model

    def _check_open(self) -> None:
        if self._is_closed:
            raise BackendError("the backend is closed")

    async def _replace_model(self) -> WeaverModel:
        """Abandon the current session and return a model in a new one."""
        self._check_open()
        previous, self._model, self._reference = self._model, None, None
        if previous is not None:
            await _end_model(previous)
        return await start_session(self._create_model)

    async def _create_model(self) -> WeaverModel:
        service, section = WeaverClient(self._access), self._section
        lora = LoraConfig(
            rank=section.rank,
            seed=self._seed,
            train_unembed=section.train_unembed,
            train_mlp=section.train_mlp,
            train_attn=section.train_attn,
        )

        async def create() -> AsyncTrainingClient:
            await service.connect()
            # With a fixed sequence id, a repeated request does not create a second model.
            return await service.create_model(
                base_model=self._access.base_model, model_seq_id=1, lora_config=lora
            )

        try:
            return WeaverModel(service, await self._call("start", create), self._call_policy)
        except BaseException:  # including cancellation: the connection must not stay open
            await service.aclose()
            raise

    def _state_settings(self) -> dict[str, Any]:
        """Return the settings that must be equal in a saved state and in the run that loads it."""
        return {
            "format": STATE_FORMAT,
            "service": "weaver",
            "base_model": self._access.base_model,
            "rank": self._section.rank,
        }

    async def _call(self, method: str, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._call_policy.call(method, call)
        except CloudError as error:
            raise error.to_backend_error() from None


async def _end_model(model: WeaverModel) -> None:
    """Delete an abandoned model on the service and close the connection."""
    try:
        async with asyncio.timeout(END_TIMEOUT_SECONDS):
            await model.service.end_training(model.client.model_id)
    except Exception:  # noqa: BLE001 - the service may be unreachable or have no such model
        pass
    await model.service.aclose()
