"""HTTP calls to one vLLM server, and the capabilities that it reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from instar.config import VllmEngineConfig
from instar.engines.connection import STREAM_ERRORS, EngineConnection
from instar.engines.vllm.wire import GENERATE_PATH
from instar.errors import ConfigError, EngineError, EngineUnavailable
from instar.http.plain import PlainResponse
from instar.types import Json

TIMEOUT_SECONDS = 600.0
JSON_HEADERS = {"content-type": "application/json"}
ADAPTER_REQUIREMENT = "started with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
MERGED_REQUIREMENT = "started with VLLM_SERVER_DEV_MODE=1"
LORA_METRIC = "vllm:lora_requests_info"


class WorkerError(EngineError):
    """A call to vLLM's workers failed. ``weights_changed`` is False if all workers kept their weights."""

    def __init__(self, message: str, *, weights_changed: bool) -> None:
        super().__init__(message)
        self.weights_changed = weights_changed


class VllmClient:
    """Makes HTTP calls to one server. Raises EngineUnavailable if the server cannot be reached or is shutting
    down, and EngineError if the server rejects a call. Streams reuse a connection that has been idle for less
    than ``stream_keep_alive`` seconds. By default, vLLM closes it after 5 seconds."""

    def __init__(self, url: str, key: str | None = None, *, stream_keep_alive: float = 2.0) -> None:
        # Other calls are rare, and vLLM closes a connection after an error, so only streams are kept alive.
        self.connection = EngineConnection(
            url, key, "vLLM server", stream_keep_alive=stream_keep_alive, keep_alive=0.0
        )
        self.url = self.connection.url

    async def get(self, path: str, *, timeout: float = TIMEOUT_SECONDS) -> Any:
        return await self._call("GET", path, None, timeout)

    async def post(self, path: str, body: Json | None = None, *, timeout: float = TIMEOUT_SECONDS) -> Any:
        return await self._call("POST", path, body, timeout)

    async def rpc(self, method: str, kwargs: Json | None = None) -> Any:
        """Call a method on every worker and return the results. vLLM converts most result types to text."""
        response = await self.post("/collective_rpc", {"method": method, "kwargs": kwargs or {}})
        return response["results"] if response else []

    async def call_workers(self, method: str, body: Json) -> list[Json]:
        """Call a method of our worker extension on every worker. Raises WorkerError with the first error."""
        results: list[Json] = await self.rpc(method, {"text": msgspec.json.encode(body).decode()})
        errors = [result["error"] for result in results if "error" in result]
        if errors:
            changed = any("error" not in result or result.get("weights_changed") for result in results)
            raise WorkerError(f"A vLLM worker failed: {errors[0]}", weights_changed=changed)
        return results

    async def get_health_error(self, timeout: float) -> EngineError | None:
        try:
            await self.get("/health", timeout=timeout)
        except EngineError as error:
            return error
        return None

    async def post_bytes(self, path: str, body: bytes) -> bytes:
        response = await self.stream(path, body)
        try:
            return await response.read()
        except STREAM_ERRORS as error:
            raise self.connection.unavailable_error(error) from error
        finally:
            response.close()

    async def stream(self, path: str, body: bytes) -> PlainResponse:
        """Send a request and return the response once it has started with status 200."""
        response = await self.connection.stream(path, body, JSON_HEADERS)
        if response.status != 200:
            try:
                raise response_error(response.status, await response.read())
            except STREAM_ERRORS as error:
                raise self.connection.unavailable_error(error) from error
        return response

    async def close(self) -> None:
        await self.connection.close()

    async def _call(self, method: str, path: str, body: Json | None, timeout: float) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        headers = None if body is None else JSON_HEADERS
        response = await self.connection.request(method, path, timeout, data, headers)
        if response.status != 200:
            raise response_error(response.status, response.body)
        try:
            return msgspec.json.decode(response.body) if response.body else None
        except msgspec.DecodeError:  # plain text, for example from /v1/load_lora_adapter
            return response.body.decode(errors="replace")


def response_error(status: int, body: bytes) -> EngineError:
    try:
        error = msgspec.json.decode(body)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (msgspec.DecodeError, KeyError, TypeError):
        text = body[:400].decode(errors="replace")
    # A server whose engine core has died responds with 500 and exits.
    is_down = status in (502, 503, 504) or "EngineCore" in str(text)
    return (EngineUnavailable if is_down else EngineError)(f"vLLM responded with status {status}: {text}")


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    can_load_adapters: bool
    can_replace_weights: bool
    can_store_version: bool
    can_generate: bool
    base_path: str
    """The path of the base model on the server."""
    max_context: int

    @classmethod
    async def query(cls, client: VllmClient) -> ServerCapabilities:
        paths = (await client.get("/openapi.json"))["paths"]
        models = (await client.get("/v1/models"))["data"]
        base = next(entry for entry in models if not entry.get("parent"))
        metrics = await client.get("/metrics")
        return cls(
            can_load_adapters="/v1/load_lora_adapter" in paths and LORA_METRIC in str(metrics),
            can_replace_weights={"/pause", "/resume", "/collective_rpc"} <= set(paths),
            can_store_version="/update_weight_version" in paths,
            can_generate=GENERATE_PATH in paths,
            base_path=base["root"],
            max_context=base["max_model_len"],
        )

    def check(self, config: VllmEngineConfig, max_context: int) -> None:
        if not self.can_generate:
            raise ConfigError(
                f"engine.servers: the server does not accept token ids at {GENERATE_PATH}; "
                "start it with --enable-scale-out."
            )
        if self.max_context < max_context:
            raise ConfigError(
                f"model.max_context: {max_context} exceeds the vLLM server's limit of {self.max_context}; "
                "decrease it, or restart the server with a larger --max-model-len."
            )
        if config.policy == "adapter" and not self.can_load_adapters:
            raise ConfigError(f"engine.policy: adapter needs a server {ADAPTER_REQUIREMENT}.")
        if config.policy == "merged" and not self.can_replace_weights:
            raise ConfigError(f"engine.policy: merged needs a server {MERGED_REQUIREMENT}.")
