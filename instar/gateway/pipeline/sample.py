"""The interface of the sources of replies (the run's engine and providers), and a timeout for their calls."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

from instar.gateway.dialects.base import Dialect, ModelRequest, ReplyChoice, ReplyChoices
from instar.gateway.pipeline.parse import RetryHeaders
from instar.gateway.pipeline.record import RequestMeta, SampledReply
from instar.gateway.session_states import SessionState
from instar.record.base import Placement, Renderer, ReplyDelta
from instar.record.graph import MessageGraph
from instar.types import Call

if TYPE_CHECKING:
    from instar.gateway.pipeline.respond import Responder

T = TypeVar("T")


@dataclass(slots=True)
class ModelCall:
    meta: RequestMeta
    dialect: Dialect
    source: Source
    state: SessionState
    retry: RetryHeaders
    body: bytes
    headers: Mapping[str, str]
    is_trainable: bool = True
    number: int = 0
    """The position of the call among the session's requests. Set when the call is placed."""
    dropped_messages: int = 0
    """The number of messages that were dropped because the prompt did not fit (`gateway.overflow`)."""

    @property
    def request(self) -> ModelRequest:
        return self.meta.request


@dataclass(frozen=True, slots=True)
class SampledResult:
    """The complete replies of a call, ready to be recorded and then sent."""

    replies: Sequence[SampledReply]
    choices: ReplyChoices
    deltas: Sequence[tuple[int, ReplyDelta]] = ()
    """The deltas that are not streamed yet."""
    raw: bytes = b""
    """The part of a provider's response that is not streamed yet."""
    content_type: str | None = None
    """The content type of ``raw``; None if it is not known or was already sent."""


class SamplingRun(ABC):
    """Samples the replies of one call."""

    placement: Placement
    """The call's placement. A source that tokenizes prompts itself adds the prompt tokens during the run."""

    @abstractmethod
    async def run(self, responder: Responder | None) -> SampledResult:
        """Sample all replies and return them. If ``responder`` is set, also stream them to the client, but
        without telling it that a reply has ended, because the call is not recorded yet."""

    @abstractmethod
    def partial_replies(self) -> Sequence[SampledReply]:
        """Return the replies that were partly sampled before `run` failed or was cancelled."""


class Source(ABC):
    name: str

    def get_renderer(self, request: ModelRequest) -> Renderer | None:
        """Return the renderer of the request's prompt, or None if the source tokenizes prompts itself."""
        return None

    def resolve_settings(self, request: ModelRequest, dialect: Dialect) -> ModelRequest:
        """Return the request with only the settings that the source honours. Raise ApiError (400) for others,
        unless they are to be ignored."""
        return request

    async def tokenize(self, headers: Mapping[str, str], function: Callable[[], T]) -> T:
        """Run ``function``, which tokenizes a large prompt. A source may use a thread pool with a limit
        per API key, which it takes from ``headers``."""
        return function()

    def check_request(self, request: ModelRequest) -> None:  # noqa: B027 - optional
        """Raise ApiError if the source cannot honour the request."""

    def check_size(self, request: ModelRequest) -> None:  # noqa: B027 - optional
        """Raise an error if the prompt is certainly too long. This is called before the request waits for
        anything, because the objects of other requests between those of a large one fragment the memory."""

    def check_prompt(self, call: ModelCall) -> None:  # noqa: B027 - optional
        """Raise ApiError if a token id in the prompt, or a stop token id, is not in the vocabulary."""

    @abstractmethod
    def start(self, call: ModelCall, graph: MessageGraph, placement: Placement) -> SamplingRun: ...

    def on_recorded(self, call: ModelCall, recorded: Sequence[Call]) -> None:  # noqa: B027 - optional
        """Called after the replies of a call were recorded and sent. It must not wait or fail."""

    @abstractmethod
    def replay(
        self, call: ModelCall, graph: MessageGraph, placement: Placement, recorded: Sequence[Call]
    ) -> list[ReplyChoice]:
        """Return the replies of recorded calls, so that they can be sent again."""

    @abstractmethod
    async def count_tokens(
        self, dialect: Dialect, request: ModelRequest, body: bytes, headers: Mapping[str, str]
    ) -> bytes:
        """Return the dialect's response with the number of prompt tokens."""


class Deadline:
    """A faster asyncio.timeout. Raises TimeoutError if its block takes longer than ``seconds``."""

    __slots__ = ("_cancelling", "_expired", "_handle", "_seconds", "_task")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a deadline needs a task"
        self._task = task
        self._cancelling = task.cancelling()
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._expire)

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, _: object) -> None:
        self._handle.cancel()
        # A cancellation for another reason must be passed on.
        is_only_cancellation = self._expired and self._task.uncancel() <= self._cancelling
        if is_only_cancellation and exc_type is asyncio.CancelledError:
            raise TimeoutError from exc

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()


def derive_seed(*parts: int) -> int:
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
