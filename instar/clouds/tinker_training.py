"""A model in training on Tinker or MinT. Calls are sent in order, and their responses are awaited
separately."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.clouds.errors import CloudError
from instar.clouds.tinker import TinkerConnection, align_prompt_logprobs, build_model_input
from instar.config import AdamConfig
from instar.types import Floats, Ids

LossInputs = Mapping[str, Floats]
"""The inputs of a loss by the names that the service uses, one value per token."""
MAX_CONCURRENT_SCORES = 16
"""The number of concurrent requests for the base model's logprobs."""
GRADIENT_NORMS = ("grad_norm", "unclipped_grad_norm", "unclipped_grad_l2", "grad_l2")
"""The names under which services report the gradient norm."""


class TinkerTrainingSession:
    """A training session on the service. Every method raises CloudError. After an error of any kind other
    than ``refused``, the effect of the call is unknown, and ``lost_reason`` says why the session can no
    longer be used."""

    def __init__(self, cloud: TinkerConnection, client: Any) -> None:
        self.connection = cloud
        self.lost_reason: str | None = None
        self._client = client
        self._last: asyncio.Future[None] | None = None
        self._base: Any = None

    async def abandon(self) -> None:
        self.lost_reason = self.lost_reason or "another session was started"
        await self.connection.close(finish=True)

    # --- calls that the service executes in order -------------------------------------------------

    def send(self, what: str, submit: Callable[[Any], Any]) -> asyncio.Task[Any]:
        """Send a call after all earlier ones and return the task that awaits its response. ``submit``
        receives the SDK's client and returns the SDK's future without waiting."""
        sent = submit(self._client)
        before, done = self._last, asyncio.get_running_loop().create_future()
        self._last = done
        task = asyncio.ensure_future(self._await_response(what, sent, before))
        # A callback, because a task that is cancelled before its first step never reaches a `finally`.
        task.add_done_callback(partial(self._release_next, what, done))
        return task

    async def _await_response(self, what: str, sent: Any, before: asyncio.Future[None] | None) -> Any:
        """Return the response. The deadline begins when the service has finished the previous call."""
        try:
            if before is not None:
                await asyncio.shield(before)
            if self.lost_reason is not None:
                sent.future().cancel()
                raise CloudError("lost", self.lost_reason)
            return await self.connection.await_result(what, sent)
        except CloudError as failure:
            if failure.kind != "refused":
                self.lost_reason = self.lost_reason or str(failure)
            raise

    def _release_next(self, what: str, done: asyncio.Future[None], task: asyncio.Task[Any]) -> None:
        if task.cancelled():  # the call may have reached the service
            reason = f"{what} was cancelled, and its effect at the service is unknown"
            self.lost_reason = self.lost_reason or reason
        done.set_result(None)

    async def send_forward(self, sequences: Sequence[Ids]) -> Awaitable[list[Floats]]:
        """Request the logprob of every token (NaN at index 0). Each sequence must have at least two
        tokens."""
        data = [(ids, {"weights": np.ones(len(ids), np.float32)}) for ids in sequences]
        return await self._send_pass("forward", data, "cross_entropy", None)

    async def send_forward_backward(
        self, data: Sequence[tuple[Ids, LossInputs]], loss: str, config: Mapping[str, float] | None
    ) -> Awaitable[list[Floats]]:
        return await self._send_pass("forward_backward", data, loss, config)

    async def _send_pass(
        self,
        what: str,
        data: Sequence[tuple[Ids, LossInputs]],
        loss: str,
        config: Mapping[str, float] | None,
    ) -> Awaitable[list[Floats]]:
        sdk = self.connection.sdk
        datums = await asyncio.to_thread(lambda: [_datum(sdk, ids, inputs) for ids, inputs in data])
        sent = self.send(what, lambda client: getattr(client, what)(datums, loss, config))
        return self._logprobs(what, sent, [len(ids) for ids, _ in data])

    async def _logprobs(self, what: str, sent: Awaitable[Any], lengths: Sequence[int]) -> list[Floats]:
        outputs = (await sent).loss_fn_outputs
        if len(outputs) != len(lengths):
            raise self._malformed(f"{what}: {len(outputs)} results for {len(lengths)} samples")
        aligned: list[Floats] = []
        for entry, length in zip(outputs, lengths, strict=True):
            if "logprobs" not in entry:
                raise self._malformed(f"{what}: a result without logprobs")
            logprobs = np.asarray(entry["logprobs"].to_numpy(), np.float32).reshape(-1)
            if len(logprobs) != length - 1:
                raise self._malformed(f"{what}: {len(logprobs)} logprobs for {length - 1} targets")
            aligned.append(np.concatenate([np.full(1, np.nan, np.float32), logprobs]))
        return aligned

    def _malformed(self, message: str) -> CloudError:
        self.lost_reason = self.lost_reason or message
        return CloudError("lost", message)

    async def send_optim_step(self, adam: AdamConfig) -> Awaitable[dict[str, float]]:
        """Request an optimizer step. The returned metrics contain ``grad_norm`` if the service reports it."""
        params = self.connection.sdk.types.AdamParams(
            learning_rate=adam.lr,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            grad_clip_norm=adam.grad_clip_norm,
        )
        return self._metrics(self.send("optim_step", lambda client: client.optim_step(params)))

    async def _metrics(self, sent: Awaitable[Any]) -> dict[str, float]:
        """Return the metrics by name, without the reduction that the service appends (`name:mean`)."""
        metrics: dict[str, float] = (await sent).metrics or {}
        plain = {name.split(":")[0].split("/")[-1]: float(value) for name, value in metrics.items()}
        norm = next((plain.pop(name) for name in GRADIENT_NORMS if name in plain), None)
        return plain if norm is None else plain | {"grad_norm": norm}

    # --- the base model ---------------------------------------------------------------------------

    async def base_logprobs(self, sequences: Sequence[Ids]) -> list[Floats]:
        """Return the base model's logprob of every token (NaN at index 0). This call has no defined order
        relative to other calls."""
        slots = asyncio.Semaphore(MAX_CONCURRENT_SCORES)

        async def score(ids: Ids) -> Floats:
            async with slots:
                request = self._base.compute_logprobs_async(build_model_input(self.connection.sdk, ids))
                return align_prompt_logprobs(await self.connection.await_result("scoring", request), len(ids))

        try:
            if self._base is None:
                name = self.connection.access.base_model
                opening = self.connection.client.create_sampling_client_async(base_model=name)
                self._base = await self.connection.await_result("opening the base model", opening)
            return await _gather([score(ids) for ids in sequences])
        except CloudError as failure:
            if failure.kind == "lost":
                self.lost_reason = self.lost_reason or str(failure)
            raise


async def _gather(work: Sequence[Coroutine[Any, Any, Floats]]) -> list[Floats]:
    """Return the results of all calls. The first error cancels the other calls."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _datum(sdk: Any, ids: Ids, inputs: LossInputs) -> Any:
    """Return a datum for the tokens. All tokens but the last are the input, and all but the first are the
    targets."""
    types = sdk.types
    tensors = {"target_tokens": _tensor(types, ids[1:].astype(np.int64), "int64")}
    for name, values in inputs.items():
        tensors[name] = _tensor(types, values[1:].astype(np.float32), "float32")
    return types.Datum(model_input=build_model_input(sdk, ids[:-1]), loss_fn_inputs=tensors)


def _tensor(types: Any, values: NDArray[Any], dtype: str) -> Any:
    return types.TensorData(data=values, dtype=dtype, shape=[len(values)])
