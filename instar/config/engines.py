"""Config sections for the engines that sample tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, model_validator

from instar.config.base import PluginConfig, PositiveInt, Seconds, Section, UnitInterval, type_shorthand


class EngineProcessConfig(Section):
    """Settings for the processes of an engine."""

    count: PositiveInt = 1
    """Number of engine processes or vLLM servers to start. The gateway distributes sessions among them."""
    python: str | None = None
    """Python interpreter for the engine processes. Default: the running interpreter, or `backend.python` for
    a `cloud` engine."""


DEFAULT_MAX_ADAPTERS = 4
"""The default of `max_adapters` of all engines."""


class LocalEngineConfig(EngineProcessConfig):
    """Samples with torch in a separate process."""

    type: Literal["local"] = "local"
    max_batch: PositiveInt = 64
    """Maximum number of replies generated at once."""
    prefill_tokens: PositiveInt = 512
    """Maximum number of prompt tokens to process in one step, in addition to the decoded tokens."""
    kv_tokens: PositiveInt | None = None
    """Number of tokens in the KV cache. Default: a third of the free memory, at most two full batches."""
    threads: PositiveInt | None = None
    """Number of torch CPU threads. Default: an equal share of the cores, halved while a trainer runs, or 1 if
    `deterministic` needs it."""
    max_adapters: PositiveInt = DEFAULT_MAX_ADAPTERS
    """Maximum number of policy versions to keep loaded, including the served one. Requests can sample from
    each of them. The least recently used ones are unloaded first. A version that is unloaded during a request
    stays in memory until the request ends."""
    deterministic: bool | None = None
    """Compute replies that do not depend on the other requests in a batch, so that a run with a seed is
    repeated bit for bit on the same CPU. This is slower, and needs one thread in fp32 or if the model has one
    KV head. It is not possible on a GPU, nor in fp32 if the model has experts. Default: true if it is
    possible and `trainer.mode` is `sync`."""


class ScriptedEngineConfig(EngineProcessConfig):
    """Returns fixed replies. Useful for tests and for trying the gateway without a model."""

    type: Literal["scripted"] = "scripted"
    replies: list[str] = ["Hello from the scripted engine."]
    """The replies, one for each turn of a conversation. After the last reply, the list starts over."""
    function: str | None = None
    """Function that takes (prompt text, seed) and returns a reply, as `package.module:function`. If it has a
    third parameter `version`, it also gets the policy version. Replaces `replies`."""
    delay: Annotated[float, Field(ge=0)] = 0.0
    """Seconds to wait before each token."""
    max_adapters: PositiveInt = DEFAULT_MAX_ADAPTERS
    """Maximum number of policy versions to keep loaded, as for the `local` engine."""


class UpstreamEngineConfig(Section):
    """Forwards agents' calls to a provider's model and records them. A call is trainable only if the provider
    returns its token ids and logprobs."""

    type: Literal["upstream"] = "upstream"
    base_url: str
    """Base URL of the provider, for example `https://api.openai.com/v1` or `https://api.anthropic.com`."""
    dialect: Literal["chat", "responses", "messages", "completions"] = "chat"
    """API format of the provider. Requests in this format or one of `also` are forwarded. Others are
    translated to `chat` or `messages` if the provider supports it. `completions` is never translated."""
    also: list[Literal["chat", "responses", "messages", "completions"]] = []
    """Other API formats that the provider supports at the same URL."""
    api_key_env: str | None = None
    """Environment variable with the provider's API key. Default: the key that the agent sends in addition to
    its Instar key, if any (see docs/gateway.md). Keys issued by Instar are never forwarded."""
    model: str | None = None
    """Model name sent to the provider. Default: the name that the agent requests."""
    token_ids: bool = False
    """Request token ids and logprobs in vLLM's format. Calls that have both are exact and trainable."""
    headers: dict[str, str] = {}
    """HTTP headers sent with every request."""
    python: str | None = None
    """Unused, because an upstream has no process of its own."""


class CloudEngineConfig(EngineProcessConfig):
    """Samples from the training service in `backend`. This is the default engine for training services."""

    type: Literal["cloud"] = "cloud"
    max_in_flight: PositiveInt = 64
    """Maximum number of concurrent requests to the service; further requests wait."""
    max_adapters: PositiveInt = DEFAULT_MAX_ADAPTERS
    """Maximum number of policy versions to keep open, as for the `local` engine."""


class VllmEngineConfig(EngineProcessConfig):
    """Samples with vLLM servers that Instar starts and supervises, or that are already running. vLLM needs a
    separate environment; set `python` to its interpreter."""

    type: Literal["vllm"] = "vllm"
    policy: Literal["auto", "adapter", "merged"] = "auto"
    """How policies are served. `adapter`: each version is a separate LoRA adapter, and a request keeps the
    version that it started with. `merged`: the adapter is merged into the served weights, and requests in
    flight continue with the new weights. `auto`: `merged` if all weights are trained or `sync.route` is
    neither `auto` nor `files`. Otherwise `adapter`, or `merged` if the server cannot load adapters. Instar
    starts servers on a CPU without support for adapters, which would more than halve their speed."""
    servers: list[str] = []
    """URLs of running servers to use instead of new ones, without `/v1`. `count` is set to their number."""
    api_key_env: str | None = None
    """Environment variable with the API key of `servers`. Servers that Instar starts get a generated key."""
    max_batch: PositiveInt = 256
    """Maximum number of replies generated at once by one server."""
    gpu_memory: UnitInterval | None = None
    """Fraction of the GPU's memory for each server. Default: 0.9, or 0.4 with a trainer on this machine."""
    kv_gib: Annotated[float, Field(gt=0)] = 1.0
    """Size of the KV cache on a CPU, in GiB."""
    lora_rank: PositiveInt | None = None
    """Maximum rank of an adapter. Default: the backend's `lora.rank`, or 16 if it has none."""
    max_adapters: PositiveInt | None = None
    """Maximum number of policy versions to keep loaded, including the served one. Requests can sample from
    each of them. Only for `policy: adapter`. Default: 4."""
    tensor_parallel: PositiveInt = 1
    """Number of GPUs that one server uses."""
    eager: bool | None = None
    """Skip compilation, for a faster start but slower sampling. Default: true on a CPU, otherwise false."""
    args: list[str] = []
    """Additional arguments for `vllm serve`."""
    env: dict[str, str] = {}
    """Additional environment variables for the servers."""
    start_timeout: Seconds = 600.0
    """Timeout for starting a server, in seconds."""

    @model_validator(mode="after")
    def _check_max_adapters(self) -> Self:
        if self.policy == "merged" and self.max_adapters is not None:
            raise ValueError(
                f"max_adapters: {self.max_adapters} is not possible with `policy: merged`, which serves one "
                "version; remove the setting, or set `policy: adapter`"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _set_count(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not value.get("servers"):
            return cast(Any, value)
        count = len(cast(Any, value["servers"]))
        if value.get("count", count) not in (1, count):
            raise ValueError(f"count: must match the number of `servers` ({count}), got {value['count']}")
        return {**cast(Any, value), "count": count}


class MixedEngineConfig(Section):
    """Combines several engines that serve the same model."""

    type: Literal["mixed"] = "mixed"
    parts: Annotated[
        list[
            Annotated[
                LocalEngineConfig | ScriptedEngineConfig | VllmEngineConfig | PluginConfig,
                Field(discriminator="type"),
                type_shorthand("local"),
            ]
        ],
        Field(min_length=1),
    ]
    """The engines, each with its own `count`."""
    python: str | None = None
    """Unused, because every part has its own `python`."""

    @property
    def count(self) -> int:
        """The total number of processes."""
        return sum(1 if isinstance(part, PluginConfig) else part.count for part in self.parts)


EngineConfig = Annotated[
    LocalEngineConfig
    | ScriptedEngineConfig
    | UpstreamEngineConfig
    | CloudEngineConfig
    | VllmEngineConfig
    | MixedEngineConfig
    | PluginConfig,
    Field(discriminator="type"),
    type_shorthand("local"),
]
