"""Weaver's SDK with timeouts, retries where they are safe, and classified errors.

The SDK itself sends a request up to three times if the connection fails, and polls an operation up to ten
times after errors. It does not retry a submission that the service rejects temporarily. All attempts
together are limited by `backend.deadline`.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar, cast

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from weaver import (
    AsyncOperationHandle,
    AsyncSamplingClient,
    AsyncServiceClient,
    WeaverAPIError,
    align_training_outputs,
)
from weaver.config import TensorTransport
from weaver.operations import WeaverOperationError
from weaver.types import Datum, ModelInput, ModelInputChunk

from instar.clouds.base import SERVICES, CloudAccess, CloudError, CloudErrorKind, redact_key
from instar.config import LossConfig
from instar.errors import ConfigError
from instar.http.retry import RetryPolicy, parse_retry_after
from instar.types import Floats, Ids, Sample

T = TypeVar("T")

RETRY_POLICY = RetryPolicy(first_delay=0.25, max_delay=10.0, jitter=(0.5, 1.5))
MIN_POLL_INTERVAL_SECONDS, MAX_POLL_INTERVAL_SECONDS = 0.02, 2.0
LONG_POLL_SECONDS = 0.2
"""A poll that takes longer was held open by the service, so the next one follows without a backoff."""
MAX_MALFORMED_ATTEMPTS = 3
"""The maximum number of attempts if responses are malformed, for example truncated in transit."""
TRANSIENT_STATUSES = frozenset({408, 425, 429})
LOST_STATUSES = frozenset({404, 409, 410})
LOST_CODES = ("not_found", "expired", "terminated", "gone")
TRANSPORT_ENV = "WEAVER_TENSOR_TRANSPORT"
"""Selects whether the SDK sends tensors as JSON (`default`) or as bytes (`http-binary`)."""


class WeaverClient(AsyncServiceClient):
    """The SDK's client with three changes. Closing the client does not terminate its models. The sequence id
    of a failed submission is reused, so that there is no gap. Tensors are sent as bytes if the service
    supports it, which takes a third of the time."""

    def __init__(self, access: CloudAccess) -> None:
        try:
            super().__init__(base_url=access.base_url, api_key=access.api_key, default_tags=["instar"])
        except ValueError as error:
            raise ConfigError(f"invalid Weaver SDK settings: {error} (check {TRANSPORT_ENV})") from None
        self._transports: Sequence[str] = ()
        self._last_seq: int | None = None
        self._unused_seq: int | None = None

    async def connect(self, *, ensure_session: bool = True) -> None:
        await super().connect(ensure_session=ensure_session)
        if ensure_session:
            self._transports = (await self.ensure_session()).get("tensor_transports") or ()

    @property
    def tensor_transport(self) -> TensorTransport:
        """The transport set in the environment. The default is `http-binary` if the service supports it."""
        if not os.environ.get(TRANSPORT_ENV) and "http-binary" in self._transports:
            return "http-binary"
        return super().tensor_transport

    async def terminate_model(self, model_id: str, instance_types: list[str] | None = None) -> dict[str, Any]:
        """Do nothing. The SDK calls this for every model when it closes."""
        return {}

    async def end_training(self, model_id: str) -> None:
        """Free the service's resources for a model. The service keeps its saved and exported weights."""
        await super().terminate_model(model_id, ["trainer"])

    def next_operation_seq(self, model_id: str) -> int:
        seq, self._unused_seq = self._unused_seq, None
        self._last_seq = super().next_operation_seq(model_id) if seq is None else seq
        return self._last_seq

    @contextmanager
    def reuse_sequence_id_on_error(self) -> Generator[None]:
        """If the block raises, reuse its sequence id for the next call."""
        self._last_seq = None
        try:
            yield
        except BaseException:  # including cancellation, after which the caller sends no more calls
            if self._last_seq is not None:
                self._unused_seq = self._last_seq
            raise


class WeaverError(CloudError):
    """An error from Weaver, with the number of seconds to wait before a retry."""

    def __init__(self, kind: CloudErrorKind, text: str, *, retry_after: float = 0.0) -> None:
        super().__init__(kind, text)
        self.retry_after = retry_after


def make_malformed_error(detail: str) -> WeaverError:
    return WeaverError("broken", f"malformed response from Weaver: {detail}")


class WeaverCaller:
    """Calls the service, retries calls that fail, and polls operations until they are done."""

    def __init__(self, access: CloudAccess) -> None:
        self._access = access

    async def call(self, action: str, function: Callable[[], Awaitable[T]]) -> T:
        """Call ``function`` and return its result. Retry after transient errors and malformed responses.
        Raises WeaverError for other errors, after too many malformed responses, and after the timeout."""
        deadline = _now() + self._access.call_timeout
        for attempt in count(1):
            try:
                return await self._call_once(action, function, deadline)
            except WeaverError as error:
                max_attempts = {"unavailable": math.inf, "broken": MAX_MALFORMED_ATTEMPTS}.get(error.kind, 1)
                if attempt >= max_attempts:
                    raise
                delay = max(RETRY_POLICY.delay(attempt - 1), error.retry_after)
                if _now() + delay >= deadline:
                    raise WeaverError(error.kind, f"{error}; gave up after {attempt} attempts") from None
            await asyncio.sleep(delay)
        raise AssertionError("unreachable")

    async def await_operation(self, action: str, handle: AsyncOperationHandle) -> Any:
        """Poll the operation until it is done and return its result. The polling interval doubles, unless the
        service holds the requests open. Raises WeaverError if the operation fails or times out."""
        deadline, interval = _now() + self._access.call_timeout, MIN_POLL_INTERVAL_SECONDS
        while not handle.done():
            await asyncio.sleep(interval)
            polled_at, retry_after = _now(), 0.0
            try:
                await self._call_once(action, handle.refresh, deadline)
            except WeaverError as error:
                if error.kind != "unavailable" or _now() >= deadline:
                    raise
                retry_after = error.retry_after
            was_held = _now() - polled_at > LONG_POLL_SECONDS
            backoff = max(min(2 * interval, MAX_POLL_INTERVAL_SECONDS), retry_after)
            interval = MIN_POLL_INTERVAL_SECONDS if was_held else backoff
        return await self._call_once(action, handle.result, deadline)

    async def _call_once(self, action: str, function: Callable[[], Awaitable[T]], deadline: float) -> T:
        try:
            async with asyncio.timeout_at(deadline):
                return await function()
        except TimeoutError:
            failure = WeaverError(
                "unavailable", f"{action}: Weaver did not respond within {self._access.call_timeout:g} s"
            )
        except (WeaverAPIError, WeaverOperationError, httpx.HTTPError, OSError) as error:
            failure = _classify_error(error, self._redact(f"{action}: {str(error) or type(error).__name__}"))
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            # The SDK raises these for a response that is not JSON or lacks a field.
            failure = make_malformed_error(self._redact(f"{action}: {type(error).__name__}: {error}"))
        # Raised outside the except clause to omit the cause: its text may contain the key.
        raise failure

    def _redact(self, text: str) -> str:
        return redact_key(text, self._access.api_key)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _classify_error(error: Exception, text: str) -> WeaverError:
    if isinstance(error, WeaverOperationError):
        if any(word in error.code.lower() for word in LOST_CODES):
            return WeaverError("lost", text)
        return WeaverError("unavailable" if error.retryable else "refused", text)
    if not isinstance(error, WeaverAPIError):
        return WeaverError("unavailable", f"Weaver cannot be reached: {text}")
    status = error.status_code
    if status in (401, 403):
        key_env = SERVICES["weaver"].key_env
        return WeaverError("settings", f"{text} (the key is from {key_env} or backend.api_key)")
    if status in LOST_STATUSES:
        return WeaverError("lost", text)
    is_transient = error.retryable or status in TRANSIENT_STATUSES or status >= 500
    kind = "unavailable" if is_transient else "refused"
    return WeaverError(kind, text, retry_after=parse_retry_after(error.retry_after) or 0.0)


# --- conversion of samples and responses ---


def build_model_input(ids: Ids) -> ModelInput:
    # The tokens are set after construction, because the constructor checks each token.
    chunk = ModelInputChunk("encoded_text", [])
    chunk.tokens = ids.tolist()
    return ModelInput([chunk])


def build_forward_datum(sample: Sample) -> Datum:
    """Build a datum for `forward`, in which every token except the first is a target."""
    return _build_datum(sample, {})


def build_training_datum(sample: Sample, loss: LossConfig) -> Datum:
    """Build a datum for `forward_backward`. Values of untrained tokens are 0, because NaN cannot be sent."""
    is_trained = sample.mask > 0
    weights = np.where(is_trained, sample.mask * sample.advantages, 0)[1:]
    if loss.name == "cross_entropy":
        return _build_datum(sample, {"weights": weights})
    logprobs = np.where(is_trained, sample.logprobs, 0)[1:]
    return _build_datum(sample, {"logprobs": logprobs, "advantages": weights, "loss_mask": is_trained[1:]})


def _build_datum(sample: Sample, inputs: Mapping[str, NDArray[Any]]) -> Datum:
    datum = Datum(build_model_input(sample.token_ids[:-1]))
    datum.loss_fn_inputs = {
        "target_tokens": torch.from_numpy(sample.token_ids[1:].astype(np.int64)),
        **{name: torch.from_numpy(values.astype(np.float32)) for name, values in inputs.items()},
    }
    return datum


def extract_logprobs(data: Sequence[Datum], result: Any) -> list[Floats]:
    """Return the logprobs of each datum's targets. Raises WeaverError if the response is malformed."""
    try:
        outputs = [cast(Mapping[str, Any], output) for output in align_training_outputs(data, result)]
        values = [output["logprobs"] if "logprobs" in output else output["Logprobs"] for output in outputs]
        rows = [np.asarray(row["data"] if isinstance(row, Mapping) else row, np.float32) for row in values]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise make_malformed_error(str(error)) from None
    for index, (datum, row) in enumerate(zip(data, rows, strict=True)):
        expected = len(datum.loss_fn_inputs["target_tokens"])
        if row.shape != (expected,):
            raise make_malformed_error(
                f"datum {index} has logprobs of shape {row.shape} for {expected} targets"
            )
    return rows


async def fetch_prompt_logprobs(client: AsyncSamplingClient, ids: Ids) -> Floats:
    """Return the logprob of every token (NaN at index 0). Raises ValueError or the SDK's errors."""
    logprobs = cast(Sequence[float | None], await client.compute_logprobs(prompt=build_model_input(ids)))
    values = np.array([math.nan if value is None else value for value in logprobs], np.float32)
    if len(values) != len(ids):
        raise ValueError(f"got {len(values)} logprobs for {len(ids)} tokens")
    values[:1] = math.nan
    return values


def extract_metrics(result: Any) -> dict[str, float]:
    """Return the metrics from the top level or the `result` field of a response, or {} if there are none."""
    for fields in (result, result.get("result") if isinstance(result, dict) else None):
        metrics = cast(dict[str, Any], fields).get("metrics") if isinstance(fields, dict) else None
        if isinstance(metrics, dict):
            return {
                name: float(value)
                for name, value in cast(dict[str, Any], metrics).items()
                if isinstance(value, (int, float))
            }
    return {}
