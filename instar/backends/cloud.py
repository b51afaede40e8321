"""Base class for backends that train on a cloud service, and helpers for their sessions and saved states."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from instar.backends.base import (
    NO_GRADIENT,
    Backend,
    BackendCapabilities,
    ForwardBackwardResult,
    make_cloud_capabilities,
)
from instar.backends.check import check_samples, make_nan_logprobs, select_scorable, select_trained
from instar.backends.folders import write_folder
from instar.backends.loss_values import compute_loss
from instar.clouds.base import MAX_SESSION_STARTS, SERVICES, CloudError
from instar.config import LossConfig, ModelConfig
from instar.errors import BackendError, BackendLost, BackendUnavailable, InstarError, NonFiniteError
from instar.types import Floats, Sample

logger = logging.getLogger(__name__)

T = TypeVar("T")

STATE_FILE = "state.json"
NO_SESSION = "there is no training session; call start or load_state first"
NON_FINITE_PATTERN = re.compile(
    r"\b(is|are|was) (nan|[-+]?inf(inity)?)\b|\b(not|non)[- _]?finite\b", re.IGNORECASE
)
"""Matches messages about non-finite losses and gradients, for which services have no error code. It must also
match the local backend's NonFiniteError messages, because an Instar protocol server returns them."""


class CloudBackend(Backend):
    def __init__(self, service: str, model: ModelConfig) -> None:
        self._service = service
        self._max_tokens = model.context_length
        self._vocab_size: int | None = None
        self._is_closed = False

    @property
    def capabilities(self) -> BackendCapabilities:
        service = SERVICES[self._service]
        return make_cloud_capabilities(service.losses, service.path_scheme)

    async def load_adapter(self, source: str) -> None:
        try:
            await self._load_saved_path(source, optimizer=True)
        except (BackendLost, BackendUnavailable):
            raise
        except BackendError as error:
            logger.info("cannot load %s with an optimizer state: %s", source, error)
        else:
            return
        try:
            await self._load_saved_path(source, optimizer=False)
        except (BackendLost, BackendUnavailable):
            raise
        except BackendError as error:
            raise BackendError(
                f"model.adapter: cannot load {source}: {error}; check that its rank and its base model match "
                "the settings of the backend"
            ) from error
        logger.warning("%s was loaded without an optimizer state", source)

    @abstractmethod
    async def _load_saved_path(self, saved_path: str, *, optimizer: bool) -> None:
        """Start a new session with the state at this path on the service."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise BackendError("the backend is closed")

    async def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        return await self._score(samples, self._compute_logprobs)

    async def reference_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        return await self._score(samples, self._compute_base_logprobs)

    async def _score(
        self, samples: Sequence[Sample], compute: Callable[[list[Sample]], Awaitable[list[Floats]]]
    ) -> list[Floats]:
        self._check_open()
        check_samples(samples, self._vocab_size, self._max_tokens)
        results = make_nan_logprobs(samples)
        indices = select_scorable(samples)
        self.sent_tokens += sum(len(samples[i]) for i in indices)
        if indices:
            for index, row in zip(indices, await compute([samples[i] for i in indices]), strict=True):
                results[index] = row
        return results

    async def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        self._check_open()
        check_samples(samples, self._vocab_size, self._max_tokens, loss)
        results = make_nan_logprobs(samples)
        indices = select_trained(samples)
        self.sent_tokens += sum(len(samples[i]) for i in indices)
        if indices:
            rows = await self._train([samples[i] for i in indices], loss)
            for index, row in zip(indices, rows, strict=True):
                results[index] = np.where(samples[index].mask > 0, row, np.float32(np.nan))
        value, metrics = compute_loss(loss, samples, results)
        return ForwardBackwardResult(value, results, metrics)

    @abstractmethod
    async def _compute_logprobs(self, samples: list[Sample]) -> list[Floats]: ...

    @abstractmethod
    async def _compute_base_logprobs(self, samples: list[Sample]) -> list[Floats]: ...

    @abstractmethod
    async def _train(self, samples: list[Sample], loss: LossConfig) -> list[Floats]:
        """Accumulate the gradient and return all logprobs. Raises NonFiniteError for a non-finite loss."""


@dataclass
class GradientCounter:
    calls: int = 0
    """The number of calls that have accumulated a gradient since the last optimizer step."""

    def require_gradient(self) -> None:
        # Without a gradient, a service would still apply the weight decay.
        if not self.calls:
            raise BackendError(NO_GRADIENT)


async def start_session(create: Callable[[], Awaitable[T]]) -> T:
    """Create a session, and retry if ``create`` raises BackendLost, as it may while the service restarts.
    Raises BackendError after `MAX_SESSION_STARTS` attempts."""
    message = ""
    for _ in range(MAX_SESSION_STARTS):
        try:
            return await create()
        except BackendLost as error:
            message = str(error)
    raise BackendError(message)


def translate_error(error: CloudError) -> InstarError:
    if error.kind == "refused" and NON_FINITE_PATTERN.search(str(error)):
        return NonFiniteError(str(error))
    return error.to_backend_error()


async def write_state(path: Path, state: Mapping[str, Any]) -> None:
    text = json.dumps(state, indent=1) + "\n"
    await asyncio.to_thread(write_folder, path, lambda folder: (folder / STATE_FILE).write_text(text))


def read_state(path: Path, key: str, expected: Mapping[str, Any], file: str = STATE_FILE) -> str:
    """Return the value of ``key`` in a saved state. Raises BackendError if the state cannot be read or was
    saved with settings other than the ``expected`` ones."""
    try:
        state: dict[str, Any] = dict(json.loads((path / file).read_text()))
        value = str(state[key])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BackendError(
            f"cannot load a training state from {path}: {file} is missing or invalid "
            f"({type(error).__name__}: {error})"
        ) from error
    for name, setting in expected.items():
        if state.get(name) != setting:
            raise BackendError(
                f"cannot load the training state in {path}: it was saved with {name} {state.get(name)!r}, "
                f"but this backend has {name} {setting!r}"
            )
    return value
