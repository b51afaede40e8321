"""What an engine is: tokens in, tokens out. Every variant passes tests/unit/engines/conformance.py.

Each engine is a process of its own behind `instar.engines.server`; others reach it through
`instar.engines.remote.RemoteEngine`, which is an Engine too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence

import msgspec

from instar.types import ArtifactKind, Policy, SamplingParams, TokenChunk


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine can do; fixed for its lifetime."""

    kind: str
    model: str
    vocab_size: int
    max_context: int
    artifacts: tuple[ArtifactKind, ...]
    """Kinds of policy that ``load`` takes."""
    streams: bool = True
    """False: a reply comes as one chunk."""
    versions_per_token: bool = True
    """False: a whole reply is stamped with one version."""


class EngineStatus(msgspec.Struct, frozen=True):
    version: int
    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    """Since start."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were reused."""


class Engine(ABC):
    @property
    @abstractmethod
    def info(self) -> EngineInfo: ...

    @abstractmethod
    def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[TokenChunk]:
        """Stream a reply. The last chunk, and only that, has a ``finish_reason``. Closing the
        iterator (``aclose``) or cancelling its consumer cancels the request."""

    @abstractmethod
    async def load(self, policy: Policy) -> None:
        """Serve this policy from the next token on. Requests in flight go on under it; keys and
        values computed under the old weights are never read by a request that begins later."""

    @abstractmethod
    async def status(self) -> EngineStatus: ...

    def use_cores(self, count: int) -> None:  # noqa: B027 - a hint
        """Compute on so many CPU cores from the next step on. Engines that do not compute here ignore it."""

    @abstractmethod
    async def close(self) -> None: ...
