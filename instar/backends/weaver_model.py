"""A trained model on Weaver, and the order of its calls.

Calls are submitted one after the other, in the order in which they were made, and their results are awaited
concurrently. If it is unknown what the service did, the session ends: every later call raises BackendLost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from weaver import AsyncOperationHandle, AsyncTrainingClient

from instar.backends.service import GradientCounter, translate_error
from instar.clouds.errors import CloudError
from instar.clouds.weaver import WeaverCallPolicy, WeaverClient, WeaverError
from instar.errors import BackendError, BackendLost, InstarError

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
        self._names = 0

    def make_name(self, word: str) -> str:
        self._names += 1
        return f"{word}-{self._names}"

    async def call(self, what: str, submit: Callable[[], Awaitable[AsyncOperationHandle]]) -> Any:
        """Submit a call when its turn comes and return its result. The deadline starts when the previous
        result arrives."""
        async with self._submission_lock:
            self._check_open()
            handle = await self._submit(what, submit)
            previous, received = self._results_received, asyncio.Event()
            self._results_received = received
        try:
            await previous.wait()
            return await self._call_policy.await_operation(what, handle)
        except WeaverError as error:
            raise self._handle_error(error) from None
        finally:
            received.set()

    async def call_exclusively(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """Run a call that has no sequence id, after all earlier calls and before all later ones. Returns its
        result."""
        async with self._submission_lock:
            await self._results_received.wait()
            self._check_open()
            try:
                return await self._call_policy.call(what, work)
            except WeaverError as error:
                raise self._handle_error(error) from None

    async def load(self, saved: str, *, optimizer: bool) -> None:
        load = self.client.load_state_with_optimizer if optimizer else self.client.load_state
        try:
            await self.call_exclusively("load_state", lambda: load(saved))
        except BackendLost as error:
            if await self._is_alive():
                raise BackendError(f"the saved state {saved} no longer exists: {error}") from None
            raise

    async def _is_alive(self) -> bool:
        try:
            await self._call_policy.call("list_checkpoints", self.client.list_checkpoints)
        except WeaverError:
            return False
        return True

    def parse_result(self, read: Callable[[], T]) -> T:
        """Return the result of ``read``. A malformed result ends the session."""
        try:
            return read()
        except CloudError as error:
            raise self._handle_error(error) from None

    @contextmanager
    def count_gradient(self) -> Generator[None]:
        """Count a call that adds to the gradient, unless the block raises."""
        gradient = self._gradient
        gradient.calls += 1
        try:
            yield
        except BaseException:  # also when cancelled
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
        self, what: str, submit: Callable[[], Awaitable[AsyncOperationHandle]]
    ) -> AsyncOperationHandle:
        async def submit_once() -> AsyncOperationHandle:
            # The service treats a repeated call as the same operation, and a refused call had no effect.
            with self.service.reuse_sequence_id_on_error():
                return await submit()

        try:
            return await self._call_policy.call(what, submit_once)
        except WeaverError as error:
            raise self._handle_error(error) from None
        except asyncio.CancelledError:
            self.end(f"{what} was cancelled while it was sent: it is unknown whether the service accepted it")
            raise

    def _handle_error(self, error: CloudError) -> InstarError:
        if error.kind != "refused":
            self.end(str(error))
        return translate_error(error)

    def _check_open(self) -> None:
        if self._end_reason is not None:
            raise BackendLost(self._end_reason)
