"""What samples tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from instar.config.base import PluginConfig, Positive, Section, by_word


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


EngineConfig = Annotated[
    LocalEngineConfig | ScriptedEngineConfig | UpstreamEngineConfig | CloudEngineConfig | PluginConfig,
    Field(discriminator="type"),
    by_word("local"),
]
