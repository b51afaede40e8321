"""Trains at Tinker or MinT, through their SDKs.

Calls are sent in the order they are made and answered in their own time. Where it is not known what a call
did at the service (no answer, no session), the session is given up: every later call raises BackendLost, and
`load_state` or `start` begins another one.
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
from instar.backends.check import check_samples
from instar.backends.folders import write_folder
from instar.backends.loss_values import clip_bounds, compute_loss
from instar.clouds.base import MAX_SESSION_STARTS, SERVICES
from instar.clouds.errors import CloudError
from instar.clouds.tinker import TinkerConnection
from instar.clouds.tinker_training import LossInputs, TinkerTrainingSession
from instar.config import AdamConfig, LossConfig, MintBackendConfig, ModelConfig, TinkerBackendConfig
from instar.errors import BackendError, BackendLost, NonFiniteError
from instar.models import resolve_tokenizer
from instar.types import Artifact, Floats, Sample

T = TypeVar("T")

STATE = "state.json"
_NOT_FINITE = re.compile(r"\bis (nan|[-+]?inf)\b|\b(not|non)[- ]?finite\b", re.I)


class TinkerBackend(Backend):
    def __init__(
        self, model: ModelConfig, config: TinkerBackendConfig | MintBackendConfig, *, seed: int = 0
    ) -> None:
        self._model = model
        self._config = config
        self._seed = seed
        self._vocab_size: int | None = None
        self._submission_lock = asyncio.Lock()
        """Its waiters are served in turn, so calls are sent in the order they were made."""
        self._session: TinkerTrainingSession | None = None
        self._gradient = _Gradient()
        self._closed = False

    @property
    def capabilities(self) -> BackendCapabilities:
        return cloud_capabilities(SERVICES[self._config.type].losses)

    # --- sessions --------------------------------------------------------------------------------

    async def start(self) -> None:
        config = self._config

        def create(cloud: TinkerConnection) -> Any:
            return cloud.client.create_lora_training_client(
                base_model=cloud.access.base_model,
                rank=config.rank,
                seed=self._seed,
                train_mlp=config.train_mlp,
                train_attn=config.train_attn,
                train_unembed=config.train_unembed,
            )

        await self._start_session("creating the model", create)

    async def load_state(self, path: Path, *, optimizer: bool = True) -> None:
        saved = self._read_state(path)

        def create(cloud: TinkerConnection) -> Any:
            if optimizer:
                return cloud.client.create_training_client_from_state_with_optimizer(saved)
            return cloud.client.create_training_client_from_state(saved)

        await self._start_session(f"loading {saved}", create)

    async def _start_session(self, what: str, create: Callable[[TinkerConnection], Any]) -> None:
        """Clients are made in a thread: the SDK blocks while it makes them."""
        async with self._submission_lock:
            self._check_open()
            if self._session is not None:
                before, self._session = self._session, None
                await before.abandon()
            if self._vocab_size is None:
                self._vocab_size = await asyncio.to_thread(_vocab_size, self._model.name)
            session = TinkerTrainingSession(*await self._connect(what, create))
            if self._closed:  # meanwhile
                await session.connection.close(finish=True)
            self._check_open()
            self._session, self._gradient = session, _Gradient()

    async def _connect(
        self, what: str, create: Callable[[TinkerConnection], Any]
    ) -> tuple[TinkerConnection, Any]:
        """Again where the service loses it while it begins, as one does that is restarted. When that goes on,
        what was asked for is not there."""
        lost = ""
        for _ in range(MAX_SESSION_STARTS):
            try:
                return await self._connect_once(what, create)
            except CloudError as failure:
                if failure.kind != "lost":
                    raise failure.to_backend_error() from None
                lost = str(failure)
        raise BackendError(lost)

    async def _connect_once(
        self, what: str, create: Callable[[TinkerConnection], Any]
    ) -> tuple[TinkerConnection, Any]:
        cloud = await TinkerConnection.connect(self._config, self._model)
        try:
            return cloud, await cloud.run_in_thread(what, lambda: create(cloud))
        except BaseException:
            await cloud.close(finish=False)
            raise

    async def close(self) -> None:
        """The session ends at the service when it hears no more of it."""
        self._closed = True
        if self._session is not None:
            session, self._session = self._session, None
            session.lost_reason = session.lost_reason or "the backend was closed"
            await session.connection.close(finish=False)

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError("the backend is closed")

    def _live_session(self) -> TinkerTrainingSession:
        self._check_open()
        if self._session is None:
            raise BackendLost("there is no training session: start one, or load a state")
        if self._session.lost_reason is not None:
            raise BackendLost(self._session.lost_reason)
        return self._session

    # --- training --------------------------------------------------------------------------------

    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        return await self._compute_logprobs(samples, in_order=True)

    async def reference_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        return await self._compute_logprobs(samples, in_order=False)

    async def _compute_logprobs(self, samples: Sequence[Sample], *, in_order: bool) -> list[Floats]:
        """Under the model in training, in the order of calls, or under the base model."""
        self._check_open()
        check_samples(samples, self._vocab_size, self._model.max_context)
        results = [np.full(len(sample), np.nan, np.float32) for sample in samples]
        # A token alone has nothing before it that would make it likely.
        asked = [i for i, sample in enumerate(samples) if len(sample) > 1]
        sequences = [samples[i].token_ids for i in asked]
        if not asked:
            return results
        if in_order:
            async with self._submission_lock:
                answer = await self._live_session().send_forward(sequences)
        else:
            answer = self._live_session().base_logprobs(sequences)
        for i, found in zip(asked, await _await_result(answer), strict=True):
            results[i] = found
        return results

    async def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        self._check_open()
        check_samples(samples, self._vocab_size, self._model.max_context, loss)
        results = [np.full(len(sample), np.nan, np.float32) for sample in samples]
        # Those without a trained token have no part in the loss.
        trained = [i for i, sample in enumerate(samples) if (sample.mask > 0).any()]
        if trained:
            chosen = [samples[i] for i in trained]
            for i, found in zip(trained, await self._train(chosen, loss), strict=True):
                results[i] = np.where(samples[i].mask > 0, found, np.nan).astype(np.float32)
        value, metrics = compute_loss(loss, samples, results)
        return ForwardBackwardResult(value, results, metrics)

    async def _train(self, samples: Sequence[Sample], loss: LossConfig) -> list[Floats]:
        async with self._submission_lock:
            session, gradient = self._live_session(), self._gradient
            held = await self._filler_logprobs(session, samples, loss)
            data = [
                (sample.token_ids, _inputs(sample, loss, old))
                for sample, old in zip(samples, held, strict=True)
            ]
            answer = await session.send_forward_backward(data, loss.name, _loss_config(loss))
            gradient.calls += 1
        try:
            logprobs = await answer
        except CloudError as failure:
            if failure.kind == "refused":
                gradient.calls -= 1
            raise _translate_failure(failure) from None
        _check_finite(session, loss, samples, logprobs)
        return logprobs

    async def _filler_logprobs(
        self, session: TinkerTrainingSession, samples: Sequence[Sample], loss: LossConfig
    ) -> list[Floats]:
        """Old logprobs for the tokens that are not trained on: a service knows no mask. Where they do not
        count, zeros; dro would draw such tokens towards them, so they are what the model gives them now."""
        if loss.name != "dro":
            return [np.zeros(len(sample), np.float32) for sample in samples]
        for sample in samples:
            if not np.isin(sample.mask, (0, 1)).all():
                raise BackendError(f"sample {sample.sample_key}: dro takes no mask other than 0 and 1 here")
        return await _await_result(await session.send_forward([sample.token_ids for sample in samples]))

    async def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        async with self._submission_lock:
            session = self._live_session()
            if not self._gradient.calls:
                raise BackendError(
                    "optim_step without a gradient: nothing was trained on since the last step"
                )
            self._gradient = _Gradient()
            answer = await session.send_optim_step(adam)
        metrics = await _await_result(answer)
        grad_norm = metrics.pop("grad_norm", None)
        if grad_norm is None:
            return OptimStepResult(math.nan, {"lr": adam.lr, **metrics})
        if not math.isfinite(grad_norm):
            session.lost_reason = "a gradient that is not finite may have been applied at the service"
            raise NonFiniteError(f"the gradient norm is {grad_norm}")
        clipped = 0.0 < adam.grad_clip_norm < grad_norm
        return OptimStepResult(grad_norm, {**metrics, "lr": adam.lr, "grad_clipped": float(clipped)})

    # --- what stays ------------------------------------------------------------------------------

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
        saved = await self._save("saving the state", lambda client: client.save_state(_unique_name(path)))
        config = self._config
        told = {
            "service": config.type,
            "state": saved,
            "base_model": config.base_model or self._model.name,
            "rank": config.rank,
            "train_attn": config.train_attn,
            "train_mlp": config.train_mlp,
            "train_unembed": config.train_unembed,
            "saved_at": time.time(),
        }
        text = json.dumps(told, indent=1) + "\n"

        def fill(folder: Path) -> None:
            (folder / STATE).write_text(text)

        await asyncio.to_thread(write_folder, path, fill)

    async def discard_state(self, path: Path) -> None:
        cloud, saved = self._live_session().connection, self._read_state(path)
        try:
            deleted = cloud.rest_client().delete_checkpoint_from_tinker_path_async(saved)
            await cloud.await_result(f"deleting {saved}", deleted)
        except CloudError as failure:
            raise BackendError(str(failure)) from None

    async def _save(self, what: str, submit: Callable[[Any], Any]) -> str:
        """Where the service keeps it."""
        async with self._submission_lock:
            answer = self._live_session().send(what, submit)
        return str((await _await_result(answer)).path)

    def _read_state(self, path: Path) -> str:
        """Where the service keeps it. Refused where this run would not make such a model."""
        try:
            told: dict[str, Any] = json.loads((path / STATE).read_text())
            saved, service = str(told["state"]), told["service"]
        except (OSError, ValueError, KeyError) as error:
            raise BackendError(f"{path} holds no state that a service keeps: {error}") from error
        wanted = {"service": self._config.type, "base_model": self._config.base_model or self._model.name}
        wanted |= {name: getattr(self._config, name) for name in ("rank", "train_attn", "train_mlp")}
        for name, value in wanted.items():
            if told.get(name) != value:
                raise BackendError(f"{path} was saved at {service} with {name} {told.get(name)}, not {value}")
        return saved


class MintBackend(TinkerBackend):
    """The same, through MinT's SDK."""


class _Gradient:
    """What was sent since the last step."""

    def __init__(self) -> None:
        self.calls = 0


async def _await_result(answer: Awaitable[T]) -> T:
    try:
        return await answer
    except CloudError as failure:
        raise _translate_failure(failure) from None


def _translate_failure(failure: CloudError) -> Exception:
    if failure.kind == "refused" and _NOT_FINITE.search(str(failure)):
        return NonFiniteError(str(failure))
    return failure.to_backend_error()


def _inputs(sample: Sample, loss: LossConfig, held: Floats) -> LossInputs:
    """What the loss takes, without a NaN: no weight under mask 0."""
    trained = sample.mask > 0
    weights = np.where(trained, sample.mask * sample.advantages, 0)
    if loss.name == "cross_entropy":
        return {"weights": weights}
    return {"logprobs": np.where(trained, sample.logprobs, held), "advantages": weights}


def _loss_config(loss: LossConfig) -> dict[str, float] | None:
    if loss.name in DEFAULT_CLIP:
        low, high = clip_bounds(loss)
        return {"clip_low_threshold": low, "clip_high_threshold": high}
    if loss.name == "dro":
        return {"beta": DEFAULT_BETA if loss.beta is None else loss.beta}
    return None


def _check_finite(
    session: TinkerTrainingSession, loss: LossConfig, samples: Sequence[Sample], logprobs: Sequence[Floats]
) -> None:
    """A service adds such a gradient all the same, and cannot take it back: the session is spoilt."""
    for sample, found in zip(samples, logprobs, strict=True):
        with np.errstate(over="ignore", invalid="ignore"):
            value, _ = compute_loss(loss, [sample], [found])
        if not math.isfinite(value):
            session.lost_reason = "a loss that is not finite is in the gradient at the service"
            raise NonFiniteError(f"the {loss.name} loss of sample {sample.sample_key} is {value}")


def _unique_name(path: Path) -> str:
    """A name at the service: the same one may be saved again, by another session too."""
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', path.name)}-{uuid.uuid4().hex[:8]}"


def _vocab_size(name: str) -> int | None:
    config: dict[str, Any] = json.loads((resolve_tokenizer(name) / "config.json").read_text())
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else None
