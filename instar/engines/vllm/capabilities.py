"""The capabilities of a vLLM server that was started by someone else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from instar.config import VllmEngineConfig
from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.wire import GENERATE_PATH
from instar.errors import ConfigError

SCALE_OUT = "--enable-scale-out"
"""A flag of vLLM's server. Versions before 0.27 do not have it and do not need it."""
FOR_ADAPTERS = "started with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
FOR_MERGED = "started with VLLM_SERVER_DEV_MODE=1"
LORA_METRIC = "vllm:lora_requests_info"


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    loads_adapters: bool
    replaces_weights: bool
    stores_version: bool
    """True if the server stores a name for its weights."""
    generates: bool
    root: str
    """The path of the base model on the server."""
    max_context: int

    @classmethod
    async def query(cls, client: VllmClient) -> ServerCapabilities:
        paths = (await client.get("/openapi.json"))["paths"]
        models = (await client.get("/v1/models"))["data"]
        base = next(entry for entry in models if not entry.get("parent"))
        metrics = await client.get("/metrics")
        return cls(
            loads_adapters="/v1/load_lora_adapter" in paths and LORA_METRIC in str(metrics),
            replaces_weights={"/pause", "/resume", "/collective_rpc"} <= set(paths),
            stores_version="/update_weight_version" in paths,
            generates=GENERATE_PATH in paths,
            root=base["root"],
            max_context=base["max_model_len"],
        )

    def check(self, config: VllmEngineConfig, max_context: int) -> None:
        """Raise ConfigError if the server lacks something that the run needs."""
        if not self.generates:
            raise ConfigError(
                f"engine.servers: the server does not accept token ids at {GENERATE_PATH}; "
                f"start it with {SCALE_OUT}"
            )
        if self.max_context < max_context:
            raise ConfigError(
                f"model.max_context: given {max_context}; the server at engine.servers was started for "
                f"{self.max_context} (--max-model-len)"
            )
        if config.policy == "adapter" and not self.loads_adapters:
            raise ConfigError(f"engine.policy: adapter needs a server {FOR_ADAPTERS}")
        if config.policy == "merged" and not self.replaces_weights:
            raise ConfigError(f"engine.policy: merged needs a server {FOR_MERGED}")

    def choose_policy_mode(self, config: VllmEngineConfig) -> Literal["adapter", "merged"] | None:
        if config.policy != "auto":
            return config.policy
        return "adapter" if self.loads_adapters else "merged" if self.replaces_weights else None

    @property
    def requirements(self) -> str:
        return f"for `engine.policy: adapter` it must be {FOR_ADAPTERS}, for `merged` {FOR_MERGED}"
