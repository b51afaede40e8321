"""A connection to Tinker or MinT, with timeouts and classified errors.

MinT's SDK is an older version of tinker under a different module name. The SDK itself retries transient
errors (no connection, 408, 409, 429, 5xx) with backoff: for five minutes when it sends a request, without a
limit when it waits for a result, and for two hours when it samples. Every wait here is therefore limited by
`backend.deadline`.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import warnings
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from instar.async_utils import run_in_daemon_thread
from instar.clouds.base import (
    SERVICES,
    CloudAccess,
    CloudError,
    CloudService,
    find_installed_version,
    redact_key,
    resolve_access,
)
from instar.config import CloudConfig, ModelConfig
from instar.errors import ConfigError
from instar.types import Floats, Ids

T = TypeVar("T")

FINISH_TIMEOUT_SECONDS = 5.0
_GONE_PATTERN = re.compile(
    r"\b(unknown|not found|no such|expired|no longer|ended|closed|terminated|gone)\b", re.I
)
_SESSION_PATTERN = re.compile(r"\b(session|model|run)\b", re.I)
_TRANSIENT_STATUSES = frozenset({408, 409, 425, 429})


# --- the SDK ---


def load_sdk(service: CloudService) -> tuple[Any, str | None]:
    """Import the SDK and return it with MinT's default address (None for Tinker). Raises ConfigError if the
    SDK is not installed or conflicts with the other service's SDK."""
    mint, tinker_version = SERVICES["mint"].package, find_installed_version("tinker")
    if service.name == "tinker" and find_installed_version(mint):
        raise _make_conflict_error(service, f"{mint}, which pins tinker {tinker_version}")
    if find_installed_version(service.package) is None:
        if tinker_version:
            raise _make_conflict_error(service, f"tinker {tinker_version}, and MinT pins an older version")
        raise ConfigError(f"backend.type: {service.name} needs its SDK; run {service.install_command}")
    # tinker 0.38 deprecated its `_async` methods, but in earlier versions and MinT only these can be awaited.
    warnings.filterwarnings("ignore", r"DEPRECATED: \w+\.\w+_async\(\)", FutureWarning)
    # Telemetry would report the run's errors to the service, so it is disabled unless the user enables it.
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    return _import_mint(service.name) if service.name == "mint" else (import_module(service.name), None)


@cache
def _import_mint(module: str) -> tuple[Any, str]:
    """Import MinT's module and return it with its default address, which the import stores only in
    TINKER_BASE_URL. The import also overwrites TINKER_API_KEY. Both are restored for child processes."""
    variables = {name: os.environ.pop(name, None) for name in ("TINKER_API_KEY", "TINKER_BASE_URL")}
    try:
        return import_module(module), os.environ["TINKER_BASE_URL"]
    finally:
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _make_conflict_error(service: CloudService, installed: str) -> ConfigError:
    return ConfigError(
        f"backend.type: {service.name} cannot run in this environment, which has {installed}; create a new "
        f"environment (python -m venv {service.name}-env; {service.name}-env/bin/{service.install_command}) "
        "and set backend.python to its interpreter"
    )


# --- the connection ---


class TinkerConnection:
    def __init__(self, sdk: Any, service: CloudService, access: CloudAccess) -> None:
        self.sdk = sdk
        self.service = service
        self.access = access
        self.client: Any = None  # the SDK ends the session when this object is freed
        self._holder: Any = None

    @classmethod
    async def connect(cls, section: CloudConfig, model: ModelConfig) -> TinkerConnection:
        """Connect and start a session. Raises CloudError on failure, and ConfigError for invalid settings."""
        service = SERVICES[section.type]
        access = resolve_access(section, model)
        sdk, default_url = await asyncio.to_thread(load_sdk, service)
        connection = cls(sdk, service, replace(access, base_url=access.base_url or default_url))
        client = await connection.run_in_thread(
            "connecting", connection._open, lambda client: client.holder.close()
        )
        connection.client, connection._holder = client, client.holder
        return connection

    def _open(self) -> Any:
        client = self.sdk.ServiceClient(base_url=self.access.base_url, api_key=self.access.api_key)
        _ = client.holder  # creates the session now instead of in the first call from the event loop
        return client

    async def await_result(self, action: str, response: Awaitable[T]) -> T:
        """Await the SDK's response. Raises CloudError if the call fails or times out."""
        try:
            async with asyncio.timeout(self.access.call_timeout):
                return await response
        except Exception as error:  # noqa: BLE001 - every SDK error is classified
            raise self.to_cloud_error(action, error) from None

    async def run_in_thread(
        self, action: str, function: Callable[[], T], discard: Callable[[T], None] | None = None
    ) -> T:
        """Run a blocking SDK call in a daemon thread, because the SDK may retry for minutes, and return its
        result. A result that arrives after the timeout or a cancellation is passed to ``discard``."""
        abandoned = threading.Event()

        def run() -> T:
            value = function()
            if abandoned.is_set() and discard is not None:
                discard(value)
            return value

        try:
            return await self.await_result(action, run_in_daemon_thread(run))
        except BaseException:  # including cancellation: a late result is discarded
            abandoned.set()
            raise

    async def create_client(self, action: str, create: Callable[[], Any]) -> Any:
        """Return the client that ``create`` returns, directly or (since tinker 0.38) as a future. The SDK
        blocks in both cases, so this runs in a thread."""

        def create_and_wait() -> Any:
            client = create()
            return client.result() if hasattr(client, "result_async") else client

        return await self.run_in_thread(action, create_and_wait)

    def create_rest_client(self) -> Any:
        """Return the SDK's client for stored checkpoints. MinT uses Tinker's client."""
        return import_module("tinker.lib.public_interfaces.rest_client").RestClient(self._holder)

    async def close(self, *, finish: bool, model_id: str | None = None) -> None:
        """Close the connection without raising. If ``finish`` is True, the session ends now; otherwise it
        expires later. MinT's SDK cannot end a session, so only its model is unloaded. The service keeps saved
        and published weights."""
        client, self.client = self.client, None
        if client is None:
            return
        if finish:
            # The session expires on the service if this call fails.
            with suppress(Exception):
                async with asyncio.timeout(FINISH_TIMEOUT_SECONDS):
                    if hasattr(client, "close"):
                        await client.close("success")
                    elif model_id is not None:
                        await self._holder.run_coroutine_threadsafe(self._unload(model_id))
        self._holder.close()

    async def _unload(self, model_id: str) -> None:
        pools = import_module("tinker.lib.client_connection_pool_type").ClientConnectionPoolType
        request = self.sdk.types.UnloadModelRequest(model_id=model_id)
        with self._holder.aclient(pools.TRAIN) as client:
            await client.models.unload(request=request)

    # --- errors ---

    def to_cloud_error(self, action: str, error: BaseException) -> CloudError:
        name, address = self.service.name, self.access.base_url or "its default address"
        text = redact_key(f"{type(error).__name__}: {error}".rstrip(": "), self.access.api_key)[:500]
        if isinstance(error, CloudError):
            return error
        if self.client is None and self._holder is not None:
            return CloudError("lost", f"{name}: {action} was in progress when the connection was closed")
        status = _find_status(error)
        if status in (401, 403) or "api_key must start with" in str(error):
            key = f"{self.service.key_env} (or backend.api_key)"
            return CloudError("settings", f"backend: {name} rejected the key from {key}: {text}")
        if status in (404, 410) or type(error).__name__ == "RetryableException":
            return CloudError("lost", f"{name} no longer has the session or checkpoint for {action}: {text}")
        if isinstance(error, self.sdk.RequestFailedError):
            return self._request_failed_error(action, error, text)
        if isinstance(error, TimeoutError):
            seconds = self.access.call_timeout
            return CloudError("unavailable", f"{name} at {address}: {action} took longer than {seconds:g} s")
        is_transient = status is not None and (status in _TRANSIENT_STATUSES or status >= 500)
        if is_transient or isinstance(error, self.sdk.APIConnectionError | OSError):
            return CloudError("unavailable", f"{name} at {address}: {action} failed: {text}")
        if status is not None and status >= 400:
            return CloudError("broken", f"{name}: {action} failed: {text}")
        return CloudError(
            "lost", f"{name} sent an unreadable response, so the effect of {action} is unknown: {text}"
        )

    def _request_failed_error(self, action: str, error: Any, text: str) -> CloudError:
        """Classify the failure of a request that the service had accepted."""
        text = re.sub(r" for self\.request_id=.*", "", text, flags=re.S)
        message = f"{self.service.name}: {action} failed: {text}"
        if str(getattr(error.category, "value", error.category)).lower() != "user":
            return CloudError("unavailable", message)
        is_gone = _GONE_PATTERN.search(text) and _SESSION_PATTERN.search(text)
        return CloudError("lost" if is_gone else "refused", message)


def _find_status(error: BaseException | None) -> int | None:
    """Return the HTTP status of the error or of its nearest cause that has one."""
    while error is not None:
        if isinstance(status := getattr(error, "status_code", None), int):
            return status
        error = error.__cause__
    return None


# --- inputs and logprobs ---


def build_model_input(sdk: Any, ids: Ids) -> Any:
    return sdk.types.ModelInput.from_ints(ids.tolist())


def align_prompt_logprobs(values: Sequence[float | None] | None, length: int) -> Floats:
    """Return one logprob for each token (NaN at index 0). A service may omit the first one."""
    logprobs = np.asarray([np.nan if value is None else value for value in values or []], np.float32)
    if len(logprobs) == length - 1:
        logprobs = np.concatenate([np.full(1, np.nan, np.float32), logprobs])
    if len(logprobs) != length:
        raise CloudError("broken", f"scoring: got {len(logprobs)} logprobs for {length} tokens")
    logprobs[:1] = np.nan
    return logprobs
