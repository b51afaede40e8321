"""Trains on Weaver, or on another server with the same protocol. Every session has one model.

Calls are submitted one at a time, in the order they are made, and their results are awaited concurrently. If
the effect of a call on the service is unknown, every later call raises BackendLost.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from weaver import AsyncOperationHandle, AsyncSamplingClient, AsyncTrainingClient
from weaver.types import AdamParams, Datum, LoraConfig

from instar.async_utils import map_concurrently
from instar.backends.base import OptimStepResult
from instar.backends.cloud import (
    NO_SESSION,
    CloudBackend,
    GradientCounter,
    read_state,
    start_session,
    translate_error,
    write_state,
)
from instar.backends.loss_values import compute_loss, make_non_finite_error
from instar.clouds.base import MAX_CONCURRENT_SCORE_REQUESTS, CloudAccess, CloudError, resolve_access
from instar.clouds.weaver import (
    WeaverCaller,
    WeaverClient,
    WeaverError,
    build_forward_datum,
    build_training_datum,
    extract_logprobs,
    extract_metrics,
    fetch_prompt_logprobs,
)
from instar.config import AdamConfig, LossConfig, ModelConfig, WeaverBackendConfig
from instar.errors import BackendError, BackendLost, NonFiniteError
from instar.types import Artifact, Floats, Sample

T = TypeVar("T")

STATE_FORMAT = 1
END_TIMEOUT_SECONDS = 5.0


class WeaverModel:
    """A model being trained on the service. Runs calls in the order they are made."""

    def __init__(self, service: WeaverClient, client: AsyncTrainingClient, caller: WeaverCaller) -> None:
        self.service = service
        self.client = client
        self._caller = caller
        self._submission_lock = asyncio.Lock()
        self._results_received = asyncio.Event()
        """Set when the last submitted call and all earlier calls have their results."""
        self._results_received.set()
        self._lost_reason: str | None = None
        self.gradient = GradientCounter()
        self._name_count = 0

    def make_name(self, prefix: str) -> str:
        self._name_count += 1
        return f"{prefix}-{self._name_count}"

    async def call(self, method: str, submit: Callable[[], Awaitable[AsyncOperationHandle]]) -> Any:
        """Submit a call after all earlier ones. The timeout starts when the previous result arrives."""

        async def submit_once() -> AsyncOperationHandle:
            # Retry with the same sequence id, because the service deduplicates calls by it.
            with self.service.reuse_sequence_id_on_error():
                return await submit()

        async with self._submission_lock:
            self._check_not_lost()
            try:
                with self._handle_errors():
                    handle = await self._caller.call(method, submit_once)
            except asyncio.CancelledError:
                self.mark_lost(
                    f"{method} was cancelled while being sent, so the service may have executed it"
                )
                raise
            previous, received = self._results_received, asyncio.Event()
            self._results_received = received
        try:
            await previous.wait()
            with self._handle_errors():
                return await self._caller.await_operation(method, handle)
        finally:
            received.set()

    async def compute_logprobs(self, method: str, data: Sequence[Datum], loss: str) -> list[Floats]:
        """Call ``forward`` or ``forward_backward`` and return the logprob of every token (NaN at index 0)."""
        result = await self.call(method, lambda: getattr(self.client, method)(data, loss, wait=False))
        with self._handle_errors():
            rows = extract_logprobs(data, result)
        return [np.concatenate([np.full(1, np.nan, np.float32), row]) for row in rows]

    async def call_exclusively(self, method: str, call: Callable[[], Awaitable[T]]) -> T:
        """Run a call without a sequence id: after all earlier calls and before submitting any later one."""
        async with self._submission_lock:
            await self._results_received.wait()
            self._check_not_lost()
            with self._handle_errors():
                return await self._caller.call(method, call)

    async def load(self, saved_path: str, *, optimizer: bool) -> None:
        load = self.client.load_state_with_optimizer if optimizer else self.client.load_state
        try:
            await self.call_exclusively("load_state", lambda: load(saved_path))
        except BackendLost as error:
            try:
                await self._caller.call("list_checkpoints", self.client.list_checkpoints)
            except WeaverError:
                raise error from None
            # The session is alive, so the service has lost only the saved state.
            raise BackendError(f"the saved state {saved_path} no longer exists: {error}") from None

    def consume_gradient(self) -> None:
        if self._lost_reason is None:
            self.gradient.require_gradient()
        self.gradient = GradientCounter()

    def mark_lost(self, reason: str) -> None:
        """Make all later calls raise BackendLost."""
        self._lost_reason = self._lost_reason or reason

    @contextmanager
    def _handle_errors(self) -> Generator[None]:
        try:
            yield
        except WeaverError as error:
            if error.kind != "refused":
                self.mark_lost(str(error))
            raise translate_error(error) from None

    def _check_not_lost(self) -> None:
        if self._lost_reason is not None:
            raise BackendLost(self._lost_reason)


class WeaverBackend(CloudBackend):
    def __init__(self, model: ModelConfig, config: WeaverBackendConfig, *, seed: int = 0) -> None:
        super().__init__("weaver", model)
        self._config = config
        self.artifact_lifetime_seconds = config.sampler_ttl
        self._seed = seed
        self._access: CloudAccess = resolve_access(config, model)
        self._caller = WeaverCaller(self._access)
        self._session_lock = asyncio.Lock()
        """Held while the session is replaced. It is fair, so calls are sent in the order they are made."""
        self._model: WeaverModel | None = None
        self._base_sampler: AsyncSamplingClient | None = None

    async def start(self) -> None:
        async with self._session_lock:
            self._model = await self._replace_model()

    async def _compute_logprobs(self, samples: list[Sample]) -> list[Floats]:
        model = await self._get_model()
        data = [build_forward_datum(sample) for sample in samples]
        return await model.compute_logprobs("forward", data, "forward_logprob")

    async def _train(self, samples: list[Sample], loss: LossConfig) -> list[Floats]:
        model = await self._get_model()
        data = [build_training_datum(sample, loss) for sample in samples]
        gradient = model.gradient
        gradient.calls += 1
        try:
            logprobs = await model.compute_logprobs("forward_backward", data, loss.name)
        except BaseException:  # including cancellation
            gradient.calls -= 1
            raise
        if not math.isfinite(compute_loss(loss, samples, logprobs)[0]):
            model.mark_lost("the service accumulated a gradient from a non-finite loss")
            raise make_non_finite_error(loss, samples, logprobs)
        return logprobs

    async def _compute_base_logprobs(self, samples: list[Sample]) -> list[Floats]:
        service = (await self._get_model()).service
        if self._base_sampler is None:
            self._base_sampler = await self._call(
                "reference_logprobs",
                lambda: service.create_sampling_client(base_model=self._access.base_model),
            )
        client = self._base_sampler

        async def score(sample: Sample) -> Floats:
            return await self._call(
                "reference_logprobs", lambda: fetch_prompt_logprobs(client, sample.token_ids)
            )

        return await map_concurrently(score, samples, MAX_CONCURRENT_SCORE_REQUESTS)

    async def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        model = await self._get_model()
        model.consume_gradient()
        params = AdamParams(learning_rate=adam.lr, **adam.model_dump(exclude={"lr"}))
        result = await model.call("optim_step", lambda: model.client.optim_step(params, wait=False))
        grad_norm = extract_metrics(result).get("grad_norm", math.nan)
        if math.isinf(grad_norm):
            model.mark_lost("the service may have applied a non-finite gradient")
            raise NonFiniteError(f"the gradient norm is {grad_norm}; the service may have applied the step")
        return OptimStepResult.from_norm(adam, grad_norm)

    async def publish(self, path: Path) -> Artifact:
        model = await self._get_model()
        started_at, name, ttl = time.time(), model.make_name(path.name), math.ceil(self._config.sampler_ttl)
        result = await model.call(
            "publish", lambda: model.client.save_weights_for_sampler(name=name, ttl_seconds=ttl, wait=False)
        )
        fields = cast(dict[str, Any], result) if isinstance(result, dict) else {}
        if not (sampler_path := fields.get("model_path") or fields.get("path")):
            raise BackendError("publish: Weaver's response has neither model_path nor path")
        return Artifact("remote", str(sampler_path), expires_at=started_at + ttl)

    async def save_state(self, path: Path) -> None:
        model = await self._get_model()
        name = model.make_name("state")
        saved = await model.call_exclusively(
            "save_state", lambda: model.client.save_state(name=name, checkpoint_type="weight_and_optimizer")
        )
        await write_state(path, {"path": saved.path, **self._get_state_settings()})

    async def load_state(self, path: Path, *, optimizer: bool = True) -> None:
        saved_path = read_state(path, "path", self._get_state_settings())
        await self._load_saved_path(saved_path, optimizer=optimizer)

    async def _load_saved_path(self, saved_path: str, *, optimizer: bool) -> None:
        async with self._session_lock:
            model = await self._replace_model()
            try:
                await model.load(saved_path, optimizer=optimizer)
            except BaseException:  # including cancellation: the service should not keep the model
                await _end_model(model)
                raise
            self._model = model

    async def close(self) -> None:
        self._is_closed = True
        async with self._session_lock:
            if self._model is not None:
                await self._model.service.aclose()
                self._model = None

    # --- sessions ---

    async def _get_model(self) -> WeaverModel:
        async with self._session_lock:
            self._check_open()
            if self._model is None:
                raise BackendLost(NO_SESSION)
            return self._model

    async def _replace_model(self) -> WeaverModel:
        self._check_open()
        previous, self._model, self._base_sampler = self._model, None, None
        if previous is not None:
            await _end_model(previous)
        return await start_session(self._create_model)

    async def _create_model(self) -> WeaverModel:
        service, config = WeaverClient(self._access), self._config
        trained_parts = config.model_dump(include={"train_unembed", "train_mlp", "train_attn"})
        lora = LoraConfig(rank=config.rank, seed=self._seed, **trained_parts)

        async def create() -> AsyncTrainingClient:
            await service.connect()
            # With a fixed sequence id, a repeated request does not create a second model.
            return await service.create_model(
                base_model=self._access.base_model, model_seq_id=1, lora_config=lora
            )

        try:
            return WeaverModel(service, await self._call("start", create), self._caller)
        except BaseException:  # including cancellation: the connection must not stay open
            await service.aclose()
            raise

    def _get_state_settings(self) -> dict[str, Any]:
        """Return the settings that must match between a saved state and the run that loads it."""
        return {
            "format": STATE_FORMAT,
            "service": "weaver",
            "base_model": self._access.base_model,
            "rank": self._config.rank,
        }

    async def _call(self, method: str, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._caller.call(method, call)
        except CloudError as error:
            raise error.to_backend_error() from None


async def _end_model(model: WeaverModel) -> None:
    with suppress(Exception):  # the service may be unreachable or have no such model
        async with asyncio.timeout(END_TIMEOUT_SECONDS):
            await model.service.end_training(model.client.model_id)
    await model.service.aclose()
