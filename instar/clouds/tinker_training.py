"""One model in training at Tinker or MinT: calls sent in order, answers awaited apart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instar.clouds.errors import CloudError
from instar.clouds.tinker import TinkerConnection, align_prompt_logprobs, build_model_input
from instar.config import AdamConfig
from instar.types import Floats, Ids

LossInputs = Mapping[str, Floats]
"""What a loss takes beside the tokens, aligned with them, by the service's own names."""
MAX_CONCURRENT_SCORES = 16
"""Most requests at once for the base model's logprobs."""
GRADIENT_NORMS = ("grad_norm", "unclipped_grad_norm", "unclipped_grad_l2", "grad_l2")
"""What services call it among their metrics."""


class TinkerTrainingSession:
    """Every method raises CloudFailure. After one of another kind than ``refused`` it is not known what the
    service did, and ``lost`` says why the session is of no more use."""

    def __init__(self, cloud: TinkerConnection, client: Any) -> None:
        self.connection = cloud
        self.lost_reason: str | None = None
        self._client = client
        self._last: asyncio.Future[None] | None = None
        self._base: Any = None

    async def abandon(self) -> None:
        self.lost_reason = self.lost_reason or "another session was begun"
        await self.connection.close(finish=True)

    # --- calls that the service works through in order --------------------------------------------

    def send(self, what: str, submit: Callable[[Any], Any]) -> asyncio.Task[Any]:
        """Sends now, after all that was sent before. ``submit`` is given the SDK's client and returns its
        future at once."""
        sent = submit(self._client)
        before, self._last = self._last, asyncio.get_running_loop().create_future()
        return asyncio.ensure_future(self._answer(what, sent, before, self._last))

    async def _answer(
        self, what: str, sent: Any, before: asyncio.Future[None] | None, done: asyncio.Future[None]
    ) -> Any:
        """The deadline counts from when the service is done with the call before."""
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
        except BaseException:
            self.lost_reason = (
                self.lost_reason or f"{what} was broken off, and what it did at the service is not known"
            )
            raise
        finally:
            done.set_result(None)

    async def send_forward(self, sequences: Sequence[Ids]) -> Awaitable[list[Floats]]:
        """Of every token; NaN at index 0. Sequences have two tokens or more."""
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
        built = await asyncio.to_thread(lambda: [_datum(sdk, ids, inputs) for ids, inputs in data])
        sent = self.send(what, lambda client: getattr(client, what)(built, loss, config))
        return self._logprobs(what, sent, [len(ids) for ids, _ in data])

    async def _logprobs(self, what: str, sent: Awaitable[Any], lengths: Sequence[int]) -> list[Floats]:
        outputs = (await sent).loss_fn_outputs
        if len(outputs) != len(lengths):
            raise self._garbled(f"{what}: {len(outputs)} results came back for {len(lengths)} samples")
        aligned: list[Floats] = []
        for entry, length in zip(outputs, lengths, strict=True):
            if "logprobs" not in entry:
                raise self._garbled(f"{what}: a result came back without logprobs")
            found = np.asarray(entry["logprobs"].to_numpy(), np.float32).reshape(-1)
            if len(found) != length - 1:
                raise self._garbled(f"{what}: {len(found)} logprobs came back for {length - 1} targets")
            aligned.append(np.concatenate([np.full(1, np.nan, np.float32), found]))
        return aligned

    def _garbled(self, message: str) -> CloudError:
        self.lost_reason = self.lost_reason or message
        return CloudError("lost", message)

    async def send_optim_step(self, adam: AdamConfig) -> Awaitable[dict[str, float]]:
        """Its metrics by their plain names; the gradient's norm as ``grad_norm``, where there is one."""
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
        """The service's names end in how they are reduced: `name:mean`."""
        told: dict[str, float] = (await sent).metrics or {}
        plain = {name.split(":")[0].split("/")[-1]: float(value) for name, value in told.items()}
        norm = next((plain.pop(name) for name in GRADIENT_NORMS if name in plain), None)
        return plain if norm is None else plain | {"grad_norm": norm}

    # --- the base model ---------------------------------------------------------------------------

    async def base_logprobs(self, sequences: Sequence[Ids]) -> list[Floats]:
        """Under the base model, of every token; NaN at index 0. It has no part in the order of calls."""
        slots = asyncio.Semaphore(MAX_CONCURRENT_SCORES)

        async def one(ids: Ids) -> Floats:
            async with slots:
                asked = self._base.compute_logprobs_async(build_model_input(self.connection.sdk, ids))
                return align_prompt_logprobs(await self.connection.await_result("scoring", asked), len(ids))

        try:
            if self._base is None:
                name = self.connection.access.base_model
                opening = self.connection.client.create_sampling_client_async(base_model=name)
                self._base = await self.connection.await_result("opening the base model", opening)
            return await _all([one(ids) for ids in sequences])
        except CloudError as failure:
            if failure.kind == "lost":
                self.lost_reason = self.lost_reason or str(failure)
            raise


async def _all(work: Sequence[Coroutine[Any, Any, Floats]]) -> list[Floats]:
    """What each comes to; the first failure ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _datum(sdk: Any, ids: Ids, inputs: LossInputs) -> Any:
    """Every token but the last is the input, every token but the first a target."""
    types = sdk.types
    tensors = {"target_tokens": _tensor(types, ids[1:].astype(np.int64), "int64")}
    for name, values in inputs.items():
        tensors[name] = _tensor(types, values[1:].astype(np.float32), "float32")
    return types.Datum(model_input=build_model_input(sdk, ids[:-1]), loss_fn_inputs=tensors)


def _tensor(types: Any, values: NDArray[Any], dtype: str) -> Any:
    return types.TensorData(data=values, dtype=dtype, shape=[len(values)])
