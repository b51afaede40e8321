"""The interface of engines: token ids in, token ids out. Every variant passes
tests/unit/engines/conformance.py.

Each engine runs in its own process behind `instar.engines.server`. Other processes use it through
`instar.engines.remote.RemoteEngine`, which is an Engine too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from instar.errors import EngineError
from instar.types import ArtifactKind, Floats, Ids, Json, Policy, SamplingParams, TokenChunk

Prompt = Sequence[int] | Ids
"""Token ids. An int32 array is used without a copy."""

LiveRoute = Literal["ipc", "nccl", "ray"]
"""A route by which weights reach an engine without files."""


class WeightTransfer(msgspec.Struct, frozen=True):
    """A message of a live route: some of a policy's weights, or how they will arrive."""

    policy: Policy
    route: LiveRoute
    body: Json
    """The route's own content, written by `instar.sync` and read by the engine."""


class EngineInfo(msgspec.Struct, frozen=True):
    """The capabilities of an engine. They do not change while it runs."""

    kind: str
    model: str
    vocab_size: int
    max_context: int
    artifacts: tuple[ArtifactKind, ...]
    """The kinds of policy that ``load`` accepts."""
    streams: bool = True
    """False if a reply arrives as one chunk."""
    versions_per_token: bool = True
    """False if all tokens of a reply have the same version."""
    scores: bool = False
    """True if ``logprobs`` is implemented."""
    routes: tuple[LiveRoute, ...] = ()
    """The routes by which ``stage`` accepts weights."""


class EngineStatus(msgspec.Struct, frozen=True):
    version: int
    """-1 if a weight change failed: no request is served until a policy is loaded."""
    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    """Tokens generated since the start."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were reused."""
    draining: bool = False
    """True if the engine finishes its current replies and rejects new requests."""


class Engine(ABC):
    async def bring_up(self, log_path: Path, report: Callable[[str], None]) -> None:  # noqa: B027 - optional
        """Start the engine; called once before any other method. ``log_path`` is the log file of this
        process: a child process logs to a file beside it. ``report`` writes a log line."""

    @property
    @abstractmethod
    def info(self) -> EngineInfo: ...

    @abstractmethod
    def generate(self, prompt_ids: Prompt, params: SamplingParams) -> AsyncGenerator[TokenChunk, None]:
        """Stream a reply. Only the last chunk has a ``finish_reason``; a chunk may hold several tokens.
        Closing the iterator (``aclose``) or cancelling its consumer cancels the request."""

    async def logprobs(self, token_ids: Prompt) -> Floats:
        """Return the logprob of every token given the tokens before it, under the served policy; NaN at index
        0. At most ``max_context`` tokens are accepted."""
        raise EngineError(f"The {self.info.kind} engine does not compute the logprobs of given tokens.")

    def for_session(self, session: str) -> Engine:
        """Return the engine to use for a session, preferably one that has its earlier turns cached."""
        return self

    async def refresh(self) -> EngineInfo:
        """Return ``info``, fetched again: the engine behind an address may have been replaced."""
        return self.info

    @abstractmethod
    async def load(self, policy: Policy) -> None:
        """Serve this policy from the next token on. Requests in flight continue under it. Requests that begin
        later never use keys and values computed under the old weights."""

    async def upload_files(self, policy: Policy) -> Policy:
        """Send the policy's files to an engine that cannot read them here; return the policy with their path
        at the engine."""
        return policy

    async def stage(self, transfer: WeightTransfer) -> Json:
        """Receive some of a policy's weights without affecting requests. Staged weights of another policy are
        dropped. Returns the response for the sender."""
        raise EngineError(f"The {self.info.kind} engine does not accept weights over {transfer.route}.")

    async def commit(self, policy: Policy) -> None:
        """Serve the staged weights, as ``load`` does. On an error the engine serves its previous policy, or
        none (version -1) if its weights are lost."""
        raise EngineError(f"The {self.info.kind} engine has no staged weights.")

    @abstractmethod
    async def status(self) -> EngineStatus: ...

    def use_cores(self, count: int) -> None:  # noqa: B027 - a hint
        """Compute on ``count`` CPU cores from the next step on, if this engine computes in this process."""

    @abstractmethod
    async def close(self) -> None: ...
