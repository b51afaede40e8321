"""The interface of a dialect: one API format, selected by its route and translated to the gateway's types.

Dialects do not silently ignore fields: ``ModelRequest.unsupported_error`` names a field that the engine
cannot honour. The exceptions are hints, which agents send by default and which may have no effect. The module
docstring of each dialect lists its hints, grouped by the reason why they can be ignored:

    sampling  All calls in the sampled reply are returned, and the schemas of tools are only enforced if the
              request requires a call.
    effort    Each provider defines their meaning; the engine has no such settings. Those of reasoning set the
              variables of the chat template that have this meaning, if it has any (``request_settings``).
    provider  They configure the provider's queues and caches.
    session   They identify the session (``ModelRequest.session_hints``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson

from instar.gateway.base import ApiError
from instar.record.base import ReplyDelta
from instar.types import OPTIONAL_SAMPLING_FIELDS, FinishReason, Floats, Ids, Json, Message, TokenChunk, Tool


@dataclass(frozen=True, slots=True)
class RequiredOutput:
    """A request's requirement that the reply is JSON with a schema, or calls tools."""

    param: str
    """The field of the request, for error messages."""
    schema: Json | None = None
    """The JSON schema of the reply's text, or None if the reply must call one of ``tools``."""
    tools: tuple[Tool, ...] = ()
    """The tools that the reply may call."""
    is_single_call: bool = False

    @property
    def is_optional(self) -> bool:
        """True for a required call, which is only a hint if it cannot be enforced. Agents that require a call
        with every request can handle other replies."""
        return self.schema is None

    @property
    def only_tool(self) -> str | None:
        return self.tools[0]["name"] if len(self.tools) == 1 else None


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request in any dialect. Settings that the agent left out are None or the dialect's default."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """A prompt to continue, as text or token ids, instead of messages."""
    previous_response_id: str | None = None
    """The id of a previous response. Its messages and reply precede ``messages``."""
    referenced_ids: tuple[str, ...] = ()
    """The ids of earlier responses that `Dialect.resolve_references` needs to complete ``messages``."""
    instruction_count: int = 0
    """The number of leading messages that are instructions for this request only. They come before the
    messages from ``previous_response_id``, and later requests do not inherit them."""
    session_hints: tuple[str, ...] = ()
    """Ids in the body that may identify the agent's session, such as ``user:7``, most specific first."""
    user_ids: tuple[str, ...] = ()
    """The ids of the agent's user that the body contains. They are recorded, so that the user's data can be
    found and deleted."""
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    chat_template_kwargs: Json = field(default_factory=dict[str, Any])
    """The variables of the chat template that the agent sets."""
    reasoning: Mapping[str, bool | int | str] = field(default_factory=dict[str, bool | int | str])
    """The fields that control the reasoning, by their path: a switch, a token budget, or an effort."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a reply, in addition to the model's own stop tokens."""
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    score_prompt: bool = False
    """True if the client requests the logprobs of the prompt's tokens. Nothing is sampled."""
    required_output: RequiredOutput | None = None
    unsupported: tuple[ApiError, ...] = ()
    """The errors for the parts of the request that no engine can honour."""
    ignored_fields: tuple[str, ...] = ()
    """The paths of the fields that the reply does not honour."""
    parsed_body: Any = None
    """The decoded body, for dialects that repeat parts of it in the response."""

    @property
    def unsupported_error(self) -> ApiError | None:
        return self.unsupported[0] if self.unsupported else None

    @property
    def has_optional_settings(self) -> bool:
        """True if the reply depends on settings that not every engine and chat template supports."""
        has_fields = any(getattr(self, name) is not None for name in OPTIONAL_SAMPLING_FIELDS)
        return has_fields or bool(self.chat_template_kwargs or self.reasoning or self.unsupported)

    def merge_sampling_settings(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the agent's settings with ``overrides``, and leave out settings that are None."""
        names = ("temperature", "top_p", "top_k", "max_tokens", *OPTIONAL_SAMPLING_FIELDS)
        settings = {name: getattr(self, name) for name in names} | dict(overrides)
        return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    text: str
    logprob: float
    """The logprob, or NaN if it is missing."""


TokenLogprobs = Sequence[TokenLogprob]


@dataclass(frozen=True, slots=True)
class ReplyChoice:
    """One reply. It is complete unless its finish reason is ``aborted``."""

    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    sampled_tokens: int
    logprobs: TokenLogprobs = ()
    stop_string: str | None = None
    """The stop string that ended the reply, or None if none did."""
    cached_tokens: int | None = None
    """The number of prompt tokens that were cached; None if unknown."""
    prompt_ids: Ids | None = None
    """The prompt's token ids if a provider returned them; None for the engine's replies."""
    sampled_ids: Ids | None = None
    """The sampled token ids; None if ``prompt_ids`` is None."""
    sampled_logprobs: Floats | None = None
    """The logprobs of ``sampled_ids``; NaN for a missing logprob."""
    tokens: TokenChunk | None = None
    """All sampled tokens with logprobs and versions; None unless the dialect is token-level."""


ReplyChoices = Sequence[ReplyChoice]
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


def format_openai_error(error: ApiError) -> Json:
    default = "server_error" if error.status >= 500 else "invalid_request_error"
    error_type = ERROR_TYPES.get(error.status, default)
    return {"error": {"message": error.message, "type": error_type, "param": error.param, "code": error.code}}


class StreamWriter(ABC):
    """Formats one streamed response. Every method returns the bytes to send."""

    def __init__(self, request_id: str, request: ModelRequest) -> None:
        self._request_id = request_id
        self._request = request

    def begin(self, index: int) -> bytes:
        return b""

    def write_deltas(self, index: int, deltas: Sequence[ReplyDelta], logprobs: TokenLogprobs) -> bytes:
        raise NotImplementedError

    def write_tokens(self, index: int, chunk: TokenChunk) -> bytes:
        raise NotImplementedError

    @abstractmethod
    def finish(self, choices: ReplyChoices) -> bytes:
        """Return the end of the stream. Only this part may tell the client that the replies have ended."""

    @abstractmethod
    def write_error(self, error: ApiError) -> bytes:
        """Return the event that ends a stream after a failure."""


class Dialect(ABC):
    name: str
    path: str
    """The route below ``/v1``."""
    id_prefix: str
    """The prefix of response ids."""
    messages_param: str = "messages"
    """The request field that contains the messages."""
    prompt_param: str = "prompt"
    """The request field that contains a token id prompt."""
    stream_writer_class: type[StreamWriter]
    decoder: msgspec.json.Decoder[Any]
    """The decoder of request bodies."""
    ranges: Mapping[str, tuple[float, float]]
    """The allowed minimum and maximum of each numeric field of a request body."""
    response_type: type[msgspec.Struct]
    """The type of a complete response. It may lack some fields of the gateway's responses."""
    stream_content_type: str = "text/event-stream"
    is_token_level: bool = False
    """True if clients exchange token ids. The run's engine samples all such calls, and their sessions are not
    found by content."""
    count_path: str | None = None
    """The route below ``/v1`` that counts the tokens of a prompt, or None if the API has none."""
    parses_messages_independently: bool = False
    """True if each item in the body's ``messages`` becomes one message, independently of the other items."""

    @abstractmethod
    def parse_request(self, body: bytes) -> ModelRequest:
        """Return the parsed request. Raise ApiError (400) with the path of the first invalid field."""

    def resolve_references(self, request: ModelRequest, replies: Mapping[str, Message]) -> ModelRequest:
        """Return the request with the parts of earlier replies that it refers to. ``replies`` has those that
        exist, by response id. A request that refers to others has an ``unsupported_error``."""
        raise NotImplementedError

    def build_response_fields(self, request: ModelRequest) -> Json | None:
        """Return the data to store with which the response can be returned again, or None if the API cannot
        do that. If ``store`` is False in it, the response must not be found by its id."""
        return None

    @abstractmethod
    def format_response(self, request_id: str, request: ModelRequest, choices: ReplyChoices) -> bytes: ...

    def format_error(self, error: ApiError) -> bytes:
        return orjson.dumps(format_openai_error(error))

    def format_scores(self, request_id: str, request: ModelRequest, tokens: TokenLogprobs) -> bytes:
        raise NotImplementedError

    def parse_count_request(self, body: bytes) -> ModelRequest:
        return self.parse_request(body)

    def format_count(self, tokens: int) -> bytes:
        raise NotImplementedError
