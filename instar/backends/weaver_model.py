"""A model in training at Weaver, and the order of its calls.

They are submitted one after the other, in the order they were made, and their results awaited side by side.
When it is not known what the service did, the session is over: every later call raises BackendLost.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from weaver import AsyncOperationHandle, AsyncTrainingClient

from instar.clouds.errors import CloudError
from instar.clouds.weaver import WeaverCallPolicy, WeaverClient, WeaverError
from instar.errors import BackendError, BackendLost, InstarError, NonFiniteError

T = TypeVar("T")

NOT_FINITE = re.compile(r"\b(is|are|was) (nan|[-+]?inf(inity)?)\b|\b(not|non)[- _]?finite\b", re.IGNORECASE)
"""How a service may say so: it has no code of its own for it."""


class WeaverModel:
    """The model of one session, and the order of its calls."""

    def __init__(
        self, service: WeaverClient, client: AsyncTrainingClient, patience: WeaverCallPolicy
    ) -> None:
        self.service = service
        self.client = client
        self._patience = patience
        self._submission_lock = asyncio.Lock()
        self._results_received = asyncio.Event()
        """Of the call submitted last: whether it and all before have their results."""
        self._results_received.set()
        self._end_reason: str | None = None
        """Why no further call makes sense."""
        self._gradient = _Gradient()
        self._names = 0

    def fresh_name(self, word: str) -> str:
        self._names += 1
        return f"{word}-{self._names}"

    async def call(self, what: str, submit: Callable[[], Awaitable[AsyncOperationHandle]]) -> Any:
        """Submit in turn; its result. The deadline of the result begins when the call before has its own."""
        async with self._submission_lock:
            self._check()
            handle = await self._submit(what, submit)
            before, mine = self._results_received, asyncio.Event()
            self._results_received = mine
        try:
            await before.wait()
            return await self._patience.await_operation(what, handle)
        except WeaverError as failure:
            raise self._failed(failure) from None
        finally:
            mine.set()

    async def call_exclusively(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """For what has no sequence id: when all before is done, and before anything after."""
        async with self._submission_lock:
            await self._results_received.wait()
            self._check()
            try:
                return await self._patience.call(what, work)
            except WeaverError as failure:
                raise self._failed(failure) from None

    async def load(self, place: str, *, optimizer: bool) -> None:
        load = self.client.load_state_with_optimizer if optimizer else self.client.load_state
        try:
            await self.call_exclusively("load_state", lambda: load(place))
        except BackendLost as error:
            if await self._is_alive():
                raise BackendError(f"the state saved at {place} is not there any more: {error}") from None
            raise

    async def _is_alive(self) -> bool:
        try:
            await self._patience.call("list_checkpoints", self.client.list_checkpoints)
        except WeaverError:
            return False
        return True

    def parse_result(self, read: Callable[[], T]) -> T:
        """What the answer says; a session whose answers make no sense is over."""
        try:
            return read()
        except CloudError as failure:
            raise self._failed(failure) from None

    @contextmanager
    def count_gradient(self) -> Generator[None]:
        """Around a call that adds to the gradient, unless it fails."""
        gradient = self._gradient
        gradient.calls += 1
        try:
            yield
        except BaseException:
            gradient.calls -= 1
            raise

    def consume_gradient(self) -> None:
        """A service would take an empty step, weight decay and all."""
        if self._end_reason is None and not self._gradient.calls:
            raise BackendError("optim_step without a gradient: nothing was trained on since the last step")
        self._gradient = _Gradient()

    def end(self, why: str) -> None:
        """Later calls raise BackendLost."""
        self._end_reason = self._end_reason or why

    async def _submit(
        self, what: str, submit: Callable[[], Awaitable[AsyncOperationHandle]]
    ) -> AsyncOperationHandle:
        async def once() -> AsyncOperationHandle:
            # The same call again is the same operation; one that was refused left no trace.
            with self.service.reuse_sequence_id_on_error():
                return await submit()

        try:
            return await self._patience.call(what, once)
        except WeaverError as failure:
            raise self._failed(failure) from None
        except asyncio.CancelledError:
            self.end(f"{what} was cancelled on its way: it is not known whether it was taken")
            raise

    def _failed(self, failure: CloudError) -> InstarError:
        if failure.kind == "refused":
            return (
                NonFiniteError(str(failure))
                if NOT_FINITE.search(str(failure))
                else failure.to_backend_error()
            )
        self.end(str(failure))
        return failure.to_backend_error()

    def _check(self) -> None:
        if self._end_reason is not None:
            raise BackendLost(self._end_reason)


@dataclass(slots=True)
class _Gradient:
    calls: int = 0
    """That added to it since the last step, as far as is known."""
