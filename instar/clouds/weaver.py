"""Weaver's SDK made patient: calls under a deadline, tried again where that is safe, failures named by kind.

The SDK itself sends a request that did not get through three times, and asks for an operation's state ten
times; a submission that the service refused for the moment it does not send again. All of it happens within
the deadline given here.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from instar.clouds.base import SERVICES, CloudAccess
from instar.clouds.errors import CloudError, CloudErrorKind, redact_key
from instar.config import LossConfig
from instar.errors import ConfigError
from instar.types import Floats, Ids, Sample

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0
FIRST_POLL, LONGEST_POLL = 0.02, 2.0
HELD = 0.2
"""A service that took so many seconds over a question held it until there was news: ask again at once."""
BROKEN_TRIES = 3
"""An answer that makes no sense may have been cut off on its way."""
BUSY = frozenset({408, 425, 429})
LOST = frozenset({404, 409, 410})
"""Unknown, gone, or at odds with what the service remembers of the session."""
LOST_WORDS = ("not_found", "expired", "terminated", "gone")
TRANSPORT_ENV = "WEAVER_TENSOR_TRANSPORT"
"""The SDK's own setting: whether tensors go as JSON (`default`) or as bytes (`http-binary`)."""


class WeaverClient(AsyncServiceClient):
    """The SDK's client with three habits changed: closing it, or leaving the process, does not end the models
    it made; a sequence id whose call was not taken can be given back, so that no gap is left behind; and
    tensors go as bytes, which takes a third of the time, where the service says that it takes them so."""

    def __init__(self, access: CloudAccess) -> None:
        try:
            super().__init__(base_url=access.base_url, api_key=access.api_key, default_tags=["instar"])
        except ValueError as error:
            raise ConfigError(f"{TRANSPORT_ENV} or another of the SDK's settings: {error}") from None
        self._offered: Sequence[str] = ()
        self._drawn: int | None = None
        self._given_back: int | None = None

    async def connect(self, *, ensure_session: bool = True) -> None:
        await super().connect(ensure_session=ensure_session)
        if ensure_session:
            self._offered = (await self.ensure_session()).get("tensor_transports") or ()

    @property
    def tensor_transport(self) -> TensorTransport:
        """As the environment says; where it says nothing, bytes if the session was offered them."""
        if not os.environ.get(TRANSPORT_ENV) and "http-binary" in self._offered:
            return "http-binary"
        return super().tensor_transport

    async def terminate_model(self, model_id: str, instance_types: list[str] | None = None) -> dict[str, Any]:
        """The SDK calls this for every model, when it closes: nothing is ended."""
        return {}

    async def end_training(self, model_id: str) -> None:
        """Free what trains a model. What was saved or exported of it stays."""
        await super().terminate_model(model_id, ["trainer"])

    def next_operation_seq(self, model_id: str) -> int:
        seq, self._given_back = self._given_back, None
        self._drawn = super().next_operation_seq(model_id) if seq is None else seq
        return self._drawn

    @contextmanager
    def reuse_sequence_id_on_error(self) -> Generator[None]:
        """The sequence id that is drawn inside goes to the next call, should this one fail."""
        self._drawn = None
        try:
            yield
        except BaseException:
            if self._drawn is not None:
                self._given_back = self._drawn
            raise


class WeaverError(CloudError):
    def __init__(self, kind: CloudErrorKind, text: str, *, code: str = "", wait: float = 0.0) -> None:
        """``code`` is the service's own; ``wait`` is how long it asks to be left alone."""
        super().__init__(kind, text)
        self.code = code
        self.retry_after = wait


def malformed_response(what: str) -> WeaverError:
    return WeaverError("broken", f"no sense in Weaver's answer: {what}")


class WeaverCallPolicy:
    """How calls to the service are made: within a deadline each, with their retries."""

    def __init__(self, access: CloudAccess) -> None:
        self._access = access

    async def call(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """What ``work`` returns; it may be done several times. Raises WeaverFailure."""
        until = self._until()
        for attempt, pause in enumerate(_pauses(), 1):
            try:
                return await self._once(what, work, until)
            except WeaverError as failure:
                most = {"unavailable": math.inf, "broken": BROKEN_TRIES}.get(failure.kind, 1)
                if attempt >= most:
                    raise
                wait = max(pause, failure.retry_after)
                if _now() + wait >= until:
                    raise WeaverError(failure.kind, f"{failure}; gave up after {attempt} tries") from None
            await asyncio.sleep(wait)
        raise AssertionError("the pauses do not end")

    async def await_operation(self, what: str, handle: AsyncOperationHandle) -> Any:
        """What the operation came to. It is asked for soon, then ever more rarely, unless the service holds
        the question until there is news. Raises WeaverFailure."""
        until, pause = self._until(), FIRST_POLL
        while not handle.done():
            await asyncio.sleep(pause)
            asked, wait = _now(), 0.0
            try:
                await self._once(what, handle.refresh, until)
            except WeaverError as failure:
                if failure.kind != "unavailable" or _now() >= until:
                    raise
                wait = failure.retry_after
            held = _now() - asked > HELD
            pause = FIRST_POLL if held else max(min(2 * pause, LONGEST_POLL), wait)
        return await self._once(what, handle.result, until)

    async def _once(self, what: str, work: Callable[[], Awaitable[T]], until: float) -> T:
        try:
            async with asyncio.timeout_at(until):
                return await work()
        except TimeoutError:
            failure = WeaverError(
                "unavailable", f"{what}: Weaver did not answer within {self._access.deadline:g} s"
            )
        except (WeaverAPIError, WeaverOperationError, httpx.HTTPError, OSError) as error:
            failure = _named(error, self._scrubbed(f"{what}: {str(error) or type(error).__name__}"))
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            # What the SDK raises over an answer that is not JSON, or lacks what it looks for.
            failure = malformed_response(self._scrubbed(f"{what}: {type(error).__name__}: {error}"))
        # Here, and so without its cause: that one's text may hold the key.
        raise failure

    def _until(self) -> float:
        return _now() + self._access.deadline

    def _scrubbed(self, text: str) -> str:
        return redact_key(text, self._access.api_key)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _named(error: Exception, text: str) -> WeaverError:
    if isinstance(error, WeaverOperationError):
        code = error.code.lower()
        if any(word in code for word in LOST_WORDS):
            return WeaverError("lost", text, code=code)
        return WeaverError("unavailable" if error.retryable else "refused", text, code=code)
    if not isinstance(error, WeaverAPIError):
        return WeaverError("unavailable", f"Weaver cannot be reached: {text}")
    status, code = error.status_code, error.code.lower()
    if status in (401, 403):
        return WeaverError(
            "settings", f"{text} (the key is read from {SERVICES['weaver'].key_env})", code=code
        )
    if status in LOST:
        return WeaverError("lost", text, code=code)
    busy = error.retryable or status in BUSY or status >= 500
    return WeaverError(
        "unavailable" if busy else "refused", text, code=code, wait=_seconds(error.retry_after)
    )


def _seconds(text: str | None) -> float:
    try:
        seconds = float(text or 0)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0


def _pauses() -> Iterator[float]:
    """Twice as long each time, and not in step with others."""
    pause = FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.5)
        pause = min(2 * pause, LONGEST_PAUSE)


# --- samples and what comes back ----------------------------------------------------------------


def build_model_input(ids: Ids) -> ModelInput:
    """Filled after it was made: the SDK looks at each token of what it makes one of, and again later."""
    chunk = ModelInputChunk("encoded_text", [])
    chunk.tokens = ids.tolist()
    return ModelInput([chunk])


def build_forward_datum(sample: Sample) -> Datum:
    """What `forward` sends: every token but the first is a target."""
    return _datum(sample, {})


def build_training_datum(sample: Sample, loss: LossConfig) -> Datum:
    """What `forward_backward` sends. Under mask 0 all numbers are 0: NaN cannot be sent."""
    taken = sample.mask > 0
    weights = np.where(taken, sample.mask * sample.advantages, 0)[1:]
    if loss.name == "cross_entropy":
        return _datum(sample, {"weights": weights})
    logprobs = np.where(taken, sample.logprobs, 0)[1:]
    return _datum(sample, {"logprobs": logprobs, "advantages": weights, "loss_mask": taken[1:]})


def _datum(sample: Sample, inputs: Mapping[str, NDArray[Any]]) -> Datum:
    datum = Datum(build_model_input(sample.token_ids[:-1]))
    datum.loss_fn_inputs = {
        "target_tokens": torch.from_numpy(sample.token_ids[1:].astype(np.int64)),
        **{name: torch.from_numpy(values.astype(np.float32)) for name, values in inputs.items()},
    }
    return datum


def extract_logprobs(data: Sequence[Datum], result: Any) -> list[Floats]:
    """Per datum, of its targets. Raises WeaverFailure when the answer does not fit what was sent."""
    try:
        outputs = [cast(Mapping[str, Any], output) for output in align_training_outputs(data, result)]
        rows = [_row(output) for output in outputs]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise malformed_response(str(error)) from None
    for index, (datum, row) in enumerate(zip(data, rows, strict=True)):
        wanted = len(datum.loss_fn_inputs["target_tokens"])
        if row.shape != (wanted,):
            raise malformed_response(f"{row.shape} logprobs for the {wanted} targets of datum {index}")
    return rows


def _row(output: Mapping[str, Any]) -> Floats:
    values = output["logprobs"] if "logprobs" in output else output["Logprobs"]
    if isinstance(values, Mapping):
        values = cast(Mapping[str, Any], values)["data"]
    return np.asarray(values, np.float32)


async def fetch_prompt_logprobs(client: AsyncSamplingClient, ids: Ids) -> Floats:
    """NaN for the first, which nothing stands before. Raises what the SDK raises."""
    found = cast(Sequence[float | None], await client.compute_logprobs(prompt=build_model_input(ids)))
    values = np.array([math.nan if value is None else value for value in found], np.float32)
    if len(values) != len(ids):
        raise ValueError(f"{len(values)} logprobs for {len(ids)} tokens")
    values[:1] = math.nan
    return values


def extract_metrics(result: Any) -> dict[str, float]:
    """What the service reports beside, wherever it stands."""
    for place in (result, result.get("result") if isinstance(result, dict) else None):
        found = cast(dict[str, Any], place).get("metrics") if isinstance(place, dict) else None
        if isinstance(found, dict):
            return {
                name: float(value)
                for name, value in cast(dict[str, Any], found).items()
                if isinstance(value, (int, float))
            }
    return {}
