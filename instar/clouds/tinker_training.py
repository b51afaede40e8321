"""A training session on Tinker or MinT. Calls are sent in order; their responses are awaited separately."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from instar.async_utils import map_concurrently
from instar.clouds.base import MAX_CONCURRENT_SCORE_REQUESTS, CloudError
from instar.clouds.tinker import TinkerConnection, align_prompt_logprobs, build_model_input
from instar.config import AdamConfig
from instar.types import Floats, Ids

LossInputs = Mapping[str, Floats]
"""Maps the service's input names to arrays with one value per token."""
GRADIENT_NORM_METRICS = ("grad_norm", "unclipped_grad_norm", "unclipped_grad_l2", "grad_l2")


class TinkerTrainingSession:
    """A training session. Calls raise CloudError on failure. If an ordered call fails with anything other
    than ``refused``, its effect is unknown: the session is lost, and ``lost_reason`` says why."""

    def __init__(self, connection: TinkerConnection, client: Any) -> None:
        self.connection = connection
        self.lost_reason: str | None = None
        self._client = client
        self._previous_call: asyncio.Future[None] | None = None
        self._base_sampler: Any = None

    async def end(self) -> None:
        """Close the connection, and end the session on the service without raising errors."""
        self.mark_lost("another session was started")
        await self.connection.close(finish=True, model_id=self._client.model_id)

    # --- calls that the service executes in order ---

    def send(self, action: str, submit: Callable[[Any], Any]) -> asyncio.Task[Any]:
        """Send a call after all earlier calls and return the task that awaits the response. ``submit``
        receives the SDK's client and returns the SDK's future without waiting."""
        future = submit(self._client)
        previous, finished = self._previous_call, asyncio.get_running_loop().create_future()
        self._previous_call = finished
        task = asyncio.ensure_future(self._await_response(action, future, previous))

        def release_next_call(task: asyncio.Task[Any]) -> None:
            if task.cancelled():  # the call may have reached the service
                self.mark_lost(f"{action} was cancelled, and its effect on the service is unknown")
            finished.set_result(None)

        # A callback, because a task that is cancelled before its first step never reaches a `finally`.
        task.add_done_callback(release_next_call)
        return task

    def mark_lost(self, reason: str) -> None:
        self.lost_reason = self.lost_reason or reason

    async def _await_response(self, action: str, future: Any, previous: asyncio.Future[None] | None) -> Any:
        """Await the response. The timeout starts when the service has finished the previous call."""
        try:
            if previous is not None:
                await asyncio.shield(previous)
            if self.lost_reason is not None:
                future.future().cancel()
                raise CloudError("lost", self.lost_reason)
            return await self.connection.await_result(action, future)
        except CloudError as failure:
            if failure.kind != "refused":
                self.mark_lost(str(failure))
            raise

    async def send_forward(self, sequences: Sequence[Ids]) -> Awaitable[list[Floats]]:
        """Send sequences of two or more tokens. Return an awaitable for all logprobs (NaN at index 0)."""
        data = [(ids, {"weights": np.ones(len(ids), np.float32)}) for ids in sequences]
        return await self.send_forward_backward(data, "cross_entropy", None, action="forward")

    async def send_forward_backward(
        self,
        data: Sequence[tuple[Ids, LossInputs]],
        loss: str,
        config: Mapping[str, float] | None,
        *,
        action: Literal["forward", "forward_backward"] = "forward_backward",
    ) -> Awaitable[list[Floats]]:
        sdk = self.connection.sdk
        datums = await asyncio.to_thread(lambda: [_build_datum(sdk, ids, inputs) for ids, inputs in data])
        response = self.send(action, lambda client: getattr(client, action)(datums, loss, config))
        return self._await_logprobs(action, response, [len(ids) for ids, _ in data])

    async def _await_logprobs(
        self, action: str, response: Awaitable[Any], lengths: Sequence[int]
    ) -> list[Floats]:
        outputs = (await response).loss_fn_outputs
        if len(outputs) != len(lengths):
            self._raise_lost(f"{action} returned {len(outputs)} results for {len(lengths)} samples")
        aligned: list[Floats] = []
        for entry, length in zip(outputs, lengths, strict=True):
            if "logprobs" not in entry:
                self._raise_lost(f"{action} returned a result without logprobs")
            logprobs = np.asarray(entry["logprobs"].to_numpy(), np.float32).reshape(-1)
            if len(logprobs) != length - 1:
                self._raise_lost(f"{action} returned {len(logprobs)} logprobs for {length - 1} targets")
            aligned.append(np.concatenate([np.full(1, np.nan, np.float32), logprobs]))
        return aligned

    def _raise_lost(self, message: str) -> NoReturn:
        self.mark_lost(message)
        raise CloudError("lost", message)

    async def send_optim_step(self, adam: AdamConfig) -> Awaitable[dict[str, float]]:
        """Send an optimizer step and return an awaitable for its metrics, with ``grad_norm`` if reported."""
        settings = adam.model_dump(exclude={"lr"})
        params = self.connection.sdk.types.AdamParams(learning_rate=adam.lr, **settings)
        return self._await_metrics(self.send("optim_step", lambda client: client.optim_step(params)))

    async def _await_metrics(self, response: Awaitable[Any]) -> dict[str, float]:
        """Await the metrics, and strip the path and the reduction from their names (`path/name:mean`). The
        gradient norm is always named ``grad_norm``."""
        metrics: dict[str, float] = (await response).metrics or {}
        by_name = {name.split(":")[0].split("/")[-1]: float(value) for name, value in metrics.items()}
        norm = next((by_name.pop(name) for name in GRADIENT_NORM_METRICS if name in by_name), None)
        return by_name if norm is None else by_name | {"grad_norm": norm}

    # --- the base model ---

    async def compute_base_logprobs(self, sequences: Sequence[Ids]) -> list[Floats]:
        """Return the base model's logprobs (NaN at index 0). This does not wait for earlier calls."""

        async def score(ids: Ids) -> Floats:
            request = self._base_sampler.compute_logprobs_async(build_model_input(self.connection.sdk, ids))
            return align_prompt_logprobs(await self.connection.await_result("scoring", request), len(ids))

        try:
            if self._base_sampler is None:
                name = self.connection.access.base_model
                request = self.connection.client.create_sampling_client_async(base_model=name)
                self._base_sampler = await self.connection.await_result("creating the base sampler", request)
            return await map_concurrently(score, sequences, MAX_CONCURRENT_SCORE_REQUESTS)
        except CloudError as failure:
            if failure.kind == "lost":
                self.mark_lost(str(failure))
            raise


def _build_datum(sdk: Any, ids: Ids, inputs: LossInputs) -> Any:
    """Build a datum in which every token except the first is a target."""

    def make_tensor(values: NDArray[Any], dtype: str) -> Any:
        return sdk.types.TensorData(data=values[1:].astype(dtype), dtype=dtype, shape=[len(values) - 1])

    tensors = {"target_tokens": make_tensor(ids, "int64")}
    tensors |= {name: make_tensor(values, "float32") for name, values in inputs.items()}
    return sdk.types.Datum(model_input=build_model_input(sdk, ids[:-1]), loss_fn_inputs=tensors)
