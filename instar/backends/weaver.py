"""Trains at Weaver, or at whatever serves its protocol. Every session there has one model."""

from __future__ import annotations

import asyncio
import json
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
from instar.backends.check import check_samples
from instar.backends.folders import write_folder
from instar.backends.loss_values import compute_loss
from instar.backends.weaver_model import WeaverModel
from instar.clouds.base import MAX_SESSION_STARTS, SERVICES, CloudAccess, resolve_access
from instar.clouds.errors import CloudError
from instar.clouds.weaver import (
    WeaverCallPolicy,
    WeaverClient,
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

FORMAT = 1
META = "state.json"
REFERENCE_IN_FLIGHT = 16
END_TIMEOUT = 5.0
"""Seconds that a session which is given up may take to be told so."""


class WeaverBackend(Backend):
    def __init__(self, model: ModelConfig, section: WeaverBackendConfig, *, seed: int = 0) -> None:
        self._section = section
        self._max_tokens = model.max_context
        self._seed = seed
        self._access: CloudAccess = resolve_access(section, model)
        self._patience = WeaverCallPolicy(self._access)
        self._session_lock = asyncio.Lock()
        """Held while one session takes the place of another: calls wait for it, in their order."""
        self._model: WeaverModel | None = None
        self._reference: AsyncSamplingClient | None = None
        self._closed = False

    @property
    def capabilities(self) -> BackendCapabilities:
        return cloud_capabilities(SERVICES["weaver"].losses)

    @property
    def model_id(self) -> str | None:
        """The service's name for the model in training."""
        return None if self._model is None else self._model.client.model_id

    async def start(self) -> None:
        async with self._session_lock:
            self._model = await self._replace_model()

    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        model = await self._get_model()
        check_samples(samples, None, self._max_tokens)
        results = nan_logprobs(samples)
        sent = [index for index, sample in enumerate(samples) if len(sample) > 1]
        if sent:
            data = [build_forward_datum(samples[index]) for index in sent]
            result = await model.call(
                "forward", lambda: model.client.forward(data, "forward_logprob", wait=False)
            )
            for index, row in zip(
                sent, model.parse_result(lambda: extract_logprobs(data, result)), strict=True
            ):
                results[index][1:] = row
        return results

    async def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        model = await self._get_model()
        check_samples(samples, None, self._max_tokens, loss)
        results = nan_logprobs(samples)
        sent = [index for index, sample in enumerate(samples) if (sample.mask > 0).any()]
        if sent:
            data = [build_training_datum(samples[index], loss) for index in sent]
            with model.count_gradient():
                result = await model.call(
                    "forward_backward", lambda: model.client.forward_backward(data, loss.name, wait=False)
                )
            for index, row in zip(
                sent, model.parse_result(lambda: extract_logprobs(data, result)), strict=True
            ):
                taken = samples[index].mask > 0
                results[index][taken] = row[taken[1:]]
        value, metrics = compute_loss(loss, samples, results)
        if not math.isfinite(value):
            model.end("the gradient at the service is not finite")
            raise NonFiniteError(
                f"the {loss.name} loss is {value}: {_name_non_finite_samples(loss, samples, results)}"
            )
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
        found = extract_metrics(result)
        norm = found.get("grad_norm", math.nan)
        if math.isinf(norm):
            model.end("a gradient that is not finite may have been applied at the service")
            raise NonFiniteError(f"the gradient norm is {norm}")
        metrics = {"lr": adam.lr}
        if not math.isnan(norm):
            metrics["grad_clipped"] = float(0.0 < adam.grad_clip_norm < norm)
        return OptimStepResult(norm, metrics)

    async def publish(self, path: Path) -> Artifact:
        model = await self._get_model()
        asked, name, ttl = time.time(), model.fresh_name(path.name), math.ceil(self._section.sampler_ttl)
        result = await model.call(
            "publish",
            lambda: model.client.save_weights_for_sampler(name=name, ttl_seconds=ttl, wait=False),
        )
        found = cast(dict[str, Any], result) if isinstance(result, dict) else {}
        if not (place := found.get("model_path") or found.get("path")):
            raise BackendError("publish: Weaver does not say where the sampler is")
        return Artifact("remote", str(place), expires_at=asked + ttl)

    async def save_state(self, path: Path) -> None:
        model = await self._get_model()
        name = model.fresh_name("state")
        saved = await model.call_exclusively(
            "save_state",
            lambda: model.client.save_state(name=name, checkpoint_type="weight_and_optimizer"),
        )
        meta = {
            "format": FORMAT,
            "service": "weaver",
            "path": saved.path,
            "base_model": self._access.base_model,
            "rank": self._section.rank,
        }

        def fill(folder: Path) -> None:
            (folder / META).write_text(json.dumps(meta, indent=2) + "\n")

        await asyncio.to_thread(write_folder, path, fill)

    async def load_state(self, path: Path, *, optimizer: bool = True) -> None:
        place = self._read_state(path)
        async with self._session_lock:
            model = await self._replace_model()
            try:
                await model.load(place, optimizer=optimizer)
            except BaseException:
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
        client, slots = self._reference, asyncio.Semaphore(REFERENCE_IN_FLIGHT)

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
        self._closed = True
        async with self._session_lock:
            if self._model is not None:
                await self._model.service.aclose()
                self._model = None

    # --- the session ---------------------------------------------------------------------------

    async def _get_model(self) -> WeaverModel:
        async with self._session_lock:
            self._check_open()
            if self._model is None:
                raise BackendLost("there is no training session: start one, or load a state")
            return self._model

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError("the backend is closed")

    async def _replace_model(self) -> WeaverModel:
        """In a session of its own, when the one under way has been given up."""
        self._check_open()
        old, self._model, self._reference = self._model, None, None
        if old is not None:
            await _end_model(old)
        lost = ""
        for _ in range(MAX_SESSION_STARTS):
            try:
                return await self._create_model()
            except BackendLost as error:
                lost = str(error)
        # So many sessions in a row are not lost: the service lacks what was asked for.
        raise BackendError(lost)

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
            # Always the first of its session: asked for again, it is the same one.
            return await service.create_model(
                base_model=self._access.base_model, model_seq_id=1, lora_config=lora
            )

        try:
            return WeaverModel(service, await self._call("start", create), self._patience)
        except BaseException:
            await service.aclose()
            raise

    def _read_state(self, path: Path) -> str:
        try:
            meta: dict[str, Any] = dict(json.loads((path / META).read_text()))
            place = str(meta["path"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BackendError(f"{path} is not a saved state: {error}") from error
        wanted = {"service": "weaver", "base_model": self._access.base_model, "rank": self._section.rank}
        for name, value in {"format": FORMAT, **wanted}.items():
            if meta.get(name) != value:
                raise BackendError(f"{path} was saved with {name} {meta.get(name)!r}, not {value!r}")
        return place

    async def _call(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._patience.call(what, work)
        except CloudError as failure:
            raise failure.to_backend_error() from None


async def _end_model(model: WeaverModel) -> None:
    """Of a model that nothing will be asked of any more: the service need not keep it."""
    try:
        async with asyncio.timeout(END_TIMEOUT):
            await model.service.end_training(model.client.model_id)
    except Exception:  # noqa: BLE001 - it may be gone, or out of reach: nothing is lost by that
        pass
    await model.service.aclose()


def nan_logprobs(samples: Sequence[Sample]) -> list[Floats]:
    return [np.full(len(sample), np.nan, np.float32) for sample in samples]


def _name_non_finite_samples(loss: LossConfig, samples: Sequence[Sample], logprobs: Sequence[Floats]) -> str:
    pairs = zip(samples, logprobs, strict=True)
    keys = [s.sample_key for s, row in pairs if not math.isfinite(compute_loss(loss, [s], [row])[0])]
    return ", ".join(keys[:4]) + (", ..." if len(keys) > 4 else "")
