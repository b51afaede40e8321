"""A model in training on Weaver.

Calls are submitted one after the other, in the order in which they were made, and their results are awaited
concurrently. If the effect of a call on the service is unknown, every later call raises BackendLost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from weaver import AsyncOperationHandle, AsyncTrainingClient
from weaver.types import Datum

from instar.backends.service import GradientCounter, translate_error
from instar.clouds.base import CloudError
from instar.clouds.weaver import WeaverCallPolicy, WeaverClient, WeaverError, extract_logprobs
from instar.errors import BackendError, BackendLost, InstarError
from instar.types import Floats

T = TypeVar("T")


class WeaverModel:
    def __init__(
        self, service: WeaverClient, client: AsyncTrainingClient, call_policy: WeaverCallPolicy
    ) -> None:
        self.service = service
        self.client = client
        self._call_policy = call_policy
        self._submission_lock = asyncio.Lock()
        self._results_received = asyncio.Event()
        """Set when the last submitted call and all earlier calls have their results."""
        self._results_received.set()
        self._end_reason: str | None = None
        self._gradient = GradientCounter()
        self._name_count = 0

    def make_name(self, prefix: str) -> str:
        self._name_count += 1
        return f"{prefix}-{self._name_count}"

    async def call(self, method: str, submit: Callable[[], Awaitable[AsyncOperationHandle]]) -> Any:
        """Submit a call after all earlier calls and return its result. The deadline of the call starts when
        the previous result arrives."""
        async with self._submission_lock:
            self._check_open()
            handle = await self._submit(method, submit)
            previous, received = self._results_received, asyncio.Event()
            self._results_received = received
        try:
            await previous.wait()
            return await self._call_policy.await_operation(method, handle)
        except WeaverError as error:
            raise self._handle_error(error) from None
        finally:
            received.set()

    async def compute_logprobs(self, method: str, data: Sequence[Datum], loss: str) -> list[Floats]:
        """Call ``forward`` or ``forward_backward`` and return the logprobs of each datum's targets."""
        result = await self.call(method, lambda: getattr(self.client, method)(data, loss, wait=False))
        try:
            return extract_logprobs(data, result)
        except WeaverError as error:
            raise self._handle_error(error) from None

    async def call_exclusively(self, method: str, call: Callable[[], Awaitable[T]]) -> T:
        """Run a call that has no sequence id after all earlier calls and before all later ones, and return
        its result."""
        async with self._submission_lock:
            await self._results_received.wait()
            self._check_open()
            try:
                return await self._call_policy.call(method, call)
            except WeaverError as error:
                raise self._handle_error(error) from None

    async def load(self, saved_path: str, *, optimizer: bool) -> None:
        load = self.client.load_state_with_optimizer if optimizer else self.client.load_state
        try:
            await self.call_exclusively("load_state", lambda: load(saved_path))
        except BackendLost as error:
            if await self._is_alive():
                raise BackendError(f"the saved state {saved_path} no longer exists: {error}") from None
            raise

    async def _is_alive(self) -> bool:
        try:
            await self._call_policy.call("list_checkpoints", self.client.list_checkpoints)
        except WeaverError:
            return False
        return True

    @contextmanager
    def count_gradient(self) -> Generator[None]:
        """Count a call that adds to the gradient, unless the block raises."""
        gradient = self._gradient
        gradient.calls += 1
        try:
            yield
        except BaseException:  # including cancellation
            gradient.calls -= 1
            raise

    def consume_gradient(self) -> None:
        if self._end_reason is None:
            self._gradient.require_gradient()
        self._gradient = GradientCounter()

    def end(self, reason: str) -> None:
        """Make all later calls raise BackendLost."""
        self._end_reason = self._end_reason or reason

    async def _submit(
        self, method: str, submit: Callable[[], Awaitable[AsyncOperationHandle]]
    ) -> AsyncOperationHandle:
        async def submit_once() -> AsyncOperationHandle:
            # The service treats a repeated call as the same operation, and a refused call had no effect.
            with self.service.reuse_sequence_id_on_error():
                return await submit()

        try:
            return await self._call_policy.call(method, submit_once)
        except WeaverError as error:
            raise self._handle_error(error) from None
        except asyncio.CancelledError:
            self.end(f"{method} was cancelled while it was sent, so the service may have executed it")
            raise

    def _handle_error(self, error: CloudError) -> InstarError:
        if error.kind != "refused":
            self.end(str(error))
        return translate_error(error)

    def _check_open(self) -> None:
        if self._end_reason is not None:
            raise BackendLost(self._end_reason)
