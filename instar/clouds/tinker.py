"""Tinker and MinT: a connection to the service, its deadlines and its errors.

MinT is an older tinker with an import of its own. The SDK retries by itself what passes (no connection, 408,
409, 429, 5xx), with growing pauses: five minutes when it sends a request, without end when it asks for a
result, two hours when it samples. So every wait here has the section's deadline.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from instar.clouds.base import SERVICES, CloudAccess, CloudService, resolve_access
from instar.clouds.errors import CloudError, redact_key
from instar.config import CloudConfig, ModelConfig
from instar.errors import ConfigError
from instar.types import Floats, Ids

T = TypeVar("T")

FINISH_SECONDS = 5.0
"""How long a session that is given up may take to say goodbye."""
_GONE = re.compile(r"\b(unknown|not found|no such|expired|no longer|ended|terminated|gone)\b", re.I)
_SESSION = re.compile(r"\b(session|model|run)\b", re.I)
_PASSING = frozenset({408, 409, 425, 429})


# --- the SDK -------------------------------------------------------------------------------------


def load_sdk(service: CloudService) -> tuple[Any, str | None]:
    """The SDK's module, and its own address where it has to be told. Raises ConfigError when this environment
    does not have it, or has the other service's."""
    mint, tinker = SERVICES["mint"].package, SERVICES["tinker"].package
    if service.name == "tinker" and _version(mint):
        raise ConfigError(_environment_conflict(service, f"{mint}, which pins tinker {_version(tinker)}"))
    if _version(service.package) is None:
        if _version(tinker):
            raise ConfigError(
                _environment_conflict(service, f"tinker {_version(tinker)}, and MinT pins an older one")
            )
        raise ConfigError(f"backend.type: {service.name} needs a package: {service.install}")
    # Telemetry would report the run's errors to the service; who wants that says so.
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    return _import_mint(service.module) if service.name == "mint" else (import_module(service.module), None)


@cache
def _import_mint(module: str) -> tuple[Any, str]:
    """Importing it overwrites TINKER_* with its own values. They stay as they were, for whatever this process
    starts; the address that it falls back to is in no other place."""
    before = {name: os.environ.pop(name, None) for name in ("TINKER_API_KEY", "TINKER_BASE_URL")}
    try:
        return import_module(module), os.environ["TINKER_BASE_URL"]
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _environment_conflict(service: CloudService, there: str) -> str:
    return (
        f"backend.type: {service.name} cannot run here: this environment has {there}. Make one of its own "
        f"(python -m venv {service.name}-env; {service.name}-env/bin/{service.install}) and name its "
        "interpreter as backend.python"
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- the connection ------------------------------------------------------------------------------


class TinkerConnection:
    """One session at the service. Holds the service client: the SDK ends the session when that is lost."""

    def __init__(self, sdk: Any, service: CloudService, access: CloudAccess) -> None:
        self.sdk = sdk
        self.service = service
        self.access = access
        self.client: Any = None
        self._holder: Any = None

    @classmethod
    async def connect(cls, section: CloudConfig, model: ModelConfig) -> TinkerConnection:
        """Raises CloudFailure, and ConfigError where the settings do not do."""
        service = SERVICES[section.type]
        granted = resolve_access(section, model)
        sdk, default = await asyncio.to_thread(load_sdk, service)
        cloud = cls(sdk, service, replace(granted, base_url=granted.base_url or default))
        client = await cloud.run_in_thread("connecting", cloud._open, lambda late: late.holder.close())
        cloud.client, cloud._holder = client, client.holder
        return cloud

    def _open(self) -> Any:
        client = self.sdk.ServiceClient(base_url=self.access.base_url, api_key=self.access.api_key)
        _ = client.holder  # makes the session now, and not in the first call from the event loop
        return client

    async def await_result(self, what: str, answer: Awaitable[T]) -> T:
        """What the SDK answers, within the deadline. Raises CloudFailure."""
        try:
            async with asyncio.timeout(self.access.deadline):
                return await answer
        except Exception as error:  # noqa: BLE001 - whatever the SDK raises, told apart by what can be done
            raise self.to_cloud_error(what, error) from None

    async def run_in_thread(
        self, what: str, work: Callable[[], T], discard: Callable[[T], None] | None = None
    ) -> T:
        """For calls of the SDK that block, within the deadline. One that comes back later is discarded. The
        thread does not keep the process alive: the SDK may go on trying for minutes."""
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()
        abandoned = threading.Event()

        def run() -> None:
            try:
                value = work()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                done.set_exception(error)
                return
            if abandoned.is_set() and discard is not None:
                discard(value)
            done.set_result(value)

        threading.Thread(target=run, name=f"instar-{self.service.name}", daemon=True).start()
        try:
            return await self.await_result(what, asyncio.wrap_future(done))
        except BaseException:
            abandoned.set()
            raise

    def rest_client(self) -> Any:
        """The SDK's client for what is kept at the service, on this connection. MinT has Tinker's own."""
        return import_module("tinker.lib.public_interfaces.rest_client").RestClient(self._holder)

    async def close(self, *, finish: bool) -> None:
        """``finish`` tells the service that the session is over; otherwise it ends there by itself when no
        heartbeat comes. What was saved or published stays. Does not raise."""
        client, self.client = self.client, None
        if client is None:
            return
        if finish and hasattr(client, "close"):
            # The service may be gone: then the session expires there.
            with suppress(Exception):
                async with asyncio.timeout(FINISH_SECONDS):
                    await client.close("success")
        # Stops the heartbeats and closes the connections; the service is told nothing.
        self._holder.close()

    # --- errors ----------------------------------------------------------------------------------

    def to_cloud_error(self, what: str, error: BaseException) -> CloudError:
        name, address = self.service.name, self.access.base_url or "its own address"
        said = redact_key(f"{type(error).__name__}: {error}".rstrip(": "), self.access.api_key)[:500]
        if isinstance(error, CloudError):
            return error
        if self.client is None and self._holder is not None:
            return CloudError("lost", f"{name}: {what} was under way when the connection was closed")
        status = next((s for cause in _causes(error) if (s := _status(cause)) is not None), None)
        if status in (401, 403) or "api_key must start with" in str(error):
            key = f"{self.service.key_env} (or backend.api_key)"
            return CloudError("settings", f"backend: {name} refuses the key of {key}: {said}")
        if status in (404, 410) or type(error).__name__ == "RetryableException":
            return CloudError("lost", f"{name} does not know what {what} is about any more: {said}")
        if isinstance(error, self.sdk.RequestFailedError):
            return self._request_failed_error(what, error, said)
        if isinstance(error, TimeoutError):
            seconds = self.access.deadline
            return CloudError("unavailable", f"{name} at {address}: {what} took longer than {seconds:g} s")
        passing = status is not None and (status in _PASSING or status >= 500)
        if passing or isinstance(error, self.sdk.APIConnectionError | OSError):
            return CloudError("unavailable", f"{name} at {address}: {what} failed: {said}")
        if status is not None and status >= 400:
            return CloudError("broken", f"{name}: {what} failed: {said}")
        return CloudError(
            "lost", f"{name} answered what cannot be read, so what {what} did is not known: {said}"
        )

    def _request_failed_error(self, what: str, error: Any, said: str) -> CloudError:
        """The service took the request, and then it failed there."""
        said = re.sub(r" for self\.request_id=.*", "", said, flags=re.S)
        text = f"{self.service.name}: {what} failed: {said}"
        if str(getattr(error.category, "value", error.category)).lower() != "user":
            return CloudError("unavailable", text)
        gone = _GONE.search(said) and _SESSION.search(said)
        return CloudError("lost" if gone else "refused", text)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _status(error: BaseException) -> int | None:
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


# --- what a sampler is given and gives back ------------------------------------------------------


def build_model_input(sdk: Any, ids: Ids) -> Any:
    return sdk.types.ModelInput.from_ints(ids.tolist())


def align_prompt_logprobs(values: Sequence[float | None] | None, length: int) -> Floats:
    """A service may leave out the first token's, which has none."""
    given = np.asarray([np.nan if value is None else value for value in values or []], np.float32)
    if len(given) == length - 1:
        given = np.concatenate([np.full(1, np.nan, np.float32), given])
    if len(given) != length:
        raise CloudError("broken", f"scoring: {len(given)} logprobs came back for {length} tokens")
    given[:1] = np.nan
    return given
