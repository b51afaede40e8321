"""What samples tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from instar.config.base import PluginConfig, Positive, Seconds, Section, Unit, type_shorthand


class LocalEngineConfig(Section):
    """Samples with torch, in a process of its own."""

    type: Literal["local"] = "local"
    max_batch: Positive = 64
    """Most replies generated at once."""
    prefill_tokens: Positive = 512
    """Most prompt tokens computed in one step beside the decoding ones."""
    kv_tokens: Positive | None = None
    """Tokens the KV cache holds, live and kept for reuse. Default: by the memory there is."""
    threads: Positive | None = None
    """CPU threads of torch. Default: the cores there are, shared with a trainer that runs beside it."""
    count: Positive = 1
    """How many of them to run; the gateway spreads the sessions over them."""
    python: str | None = None
    """Interpreter to run this role with. Default: the running one."""


class ScriptedEngineConfig(Section):
    """Plays given replies. For tests, and for trying the gateway without a model."""

    type: Literal["scripted"] = "scripted"
    replies: list[str] = ["Hello from the scripted engine."]
    """Replies to play, in order for each conversation turn, over again when they run out."""
    function: str | None = None
    """`package.module:function` called with (prompt text, seed) for each reply, instead of `replies`."""
    delay: Annotated[float, Field(ge=0)] = 0.0
    """Seconds to wait before each token."""
    count: Positive = 1
    """How many of them to run; the gateway spreads the sessions over them."""
    python: str | None = None
    """Interpreter to run this role with. Default: the running one."""


class UpstreamEngineConfig(Section):
    """A model that someone else serves, for agents to be recorded. Nothing is trained on a call unless the
    provider returns its token ids and logprobs."""

    type: Literal["upstream"] = "upstream"
    base_url: str
    """As its own clients are given it: `https://api.openai.com/v1`, `https://api.anthropic.com`."""
    dialect: Literal["chat", "responses", "messages", "completions"] = "chat"
    """What it speaks. Requests in this dialect are passed on as they are, others are translated: to and from
    `chat` and `messages`."""
    also: list[Literal["chat", "responses", "messages", "completions"]] = []
    """Further dialects that it speaks at the same address."""
    api_key_env: str | None = None
    """Environment variable with its key. Default: the key the agent sent, where that is not one of ours."""
    model: str | None = None
    """The model to ask it for. Default: the one that the agent asks for."""
    token_ids: bool = False
    """Ask for token ids and logprobs, as vLLM returns them: such calls are exact, and trainable."""
    headers: dict[str, str] = {}
    """Sent with every request."""
    python: str | None = None
    """Unused: it has no process of its own."""


class CloudEngineConfig(Section):
    """Samples at the service that trains: `backend` names it. What a run gets by default there."""

    type: Literal["cloud"] = "cloud"
    max_in_flight: Positive = 64
    """Most requests at the service at once; others wait."""
    count: Positive = 1
    """How many processes to run; the gateway spreads the sessions over them."""
    python: str | None = None
    """Interpreter to run this role with. Default: the backend's."""


class VllmEngineConfig(Section):
    """Samples with vLLM: servers that Instar starts and watches over, or ones that run already. vLLM lives in
    an environment of its own, whose interpreter is `python`."""

    type: Literal["vllm"] = "vllm"
    policy: Literal["auto", "adapter", "merged"] = "auto"
    """How a policy is served. `adapter`: each version is a LoRA adapter of its own beside the base weights,
    and a request ends under the version it began with. `merged`: the adapter is merged into the weights that
    are served, and requests in flight go on under them. `auto`: `merged` on a CPU, where adapters cost more
    than half of the speed, and where all weights are trained; else `adapter`."""
    count: Positive = 1
    """How many servers to start; the gateway spreads the sessions over them."""
    servers: list[str] = []
    """Addresses of servers that run already, without `/v1`. Then none is started, and `count` is theirs."""
    api_key_env: str | None = None
    """Environment variable with the key of `servers`. A server that Instar starts gets a key of its own."""
    max_batch: Positive = 256
    """Most replies generated at once by one server."""
    gpu_memory: Unit | None = None
    """Share of the GPU's memory for one server. Default: 0.9, or 0.4 with the trainer on the same GPU."""
    kv_gib: Annotated[float, Field(gt=0)] = 1.0
    """Size of the KV cache on a CPU, in GiB."""
    lora_rank: Positive | None = None
    """Largest rank of an adapter that a server is started for. Default: the backend's."""
    tensor_parallel: Positive = 1
    """GPUs that one server spreads the model over."""
    eager: bool | None = None
    """Do without compiling: starts sooner, samples slower. Default: on a CPU only."""
    args: list[str] = []
    """Further arguments of `vllm serve`."""
    env: dict[str, str] = {}
    """Further environment variables of the servers."""
    start_timeout: Seconds = 600.0
    """How long a server may take to come up."""
    python: str | None = None
    """Interpreter that has vLLM. Default: the running one."""

    @model_validator(mode="before")
    @classmethod
    def _as_many_as_servers(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not given.get("servers"):
            return cast(Any, given)
        servers = len(cast(Any, given["servers"]))
        if given.get("count", servers) not in (1, servers):
            raise ValueError(f"count: given {given['count']}; there are {servers} `servers`")
        return {**cast(Any, given), "count": servers}


class MixedEngineConfig(Section):
    """Engines of several kinds that serve the same model as one."""

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
    """The kinds, each with its own `count`."""
    python: str | None = None
    """Unused: every part names its own."""

    @property
    def count(self) -> int:
        """Processes of all parts."""
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
