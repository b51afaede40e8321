"""What an engine is: tokens in, tokens out. Every variant passes tests/unit/engines/conformance.py.

Each engine is a process of its own behind `instar.engines.server`; others reach it through
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
"""Token ids. An int32 array is passed on as it is."""


LiveRoute = Literal["ipc", "nccl", "ray"]
"""How weights reach an engine without files."""


class WeightTransfer(msgspec.Struct, frozen=True):
    """A part of a policy's weights, or a word about how they come, on the way to an engine."""

    policy: Policy
    route: LiveRoute
    body: Json
    """What the two ends of the route have agreed on: `instar.sync` writes it, the engine's end reads it."""


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
    scores: bool = False
    """Whether ``logprobs`` works."""
    routes: tuple[LiveRoute, ...] = ()
    """Ways that ``stage`` takes weights on."""


class EngineStatus(msgspec.Struct, frozen=True):
    version: int
    """-1: nothing is served until something is loaded, for a change of the weights has failed."""
    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    """Since start."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were reused."""
    draining: bool = False
    """Whether it only ends the replies under way and takes no further request."""


class Engine(ABC):
    async def bring_up(self, log_path: Path, say: Callable[[str], None]) -> None:  # noqa: B027 - most need none
        """Bring it up: called once, before anything else. ``log`` is the file that its process writes to; a
        process that it starts itself has one beside it. ``say`` writes a line."""

    @property
    @abstractmethod
    def info(self) -> EngineInfo: ...

    @abstractmethod
    def generate(self, prompt_ids: Prompt, params: SamplingParams) -> AsyncGenerator[TokenChunk, None]:
        """Stream a reply. The last chunk, and only that, has a ``finish_reason``. Closing the
        iterator (``aclose``) or cancelling its consumer cancels the request. Tokens that are there
        together may come as one chunk."""

    async def logprobs(self, token_ids: Prompt) -> Floats:
        """The logprob of every token given those before, under the policy that is served; NaN at index 0. As
        many tokens as the context holds. Cancelling the caller gives it up."""
        raise EngineError(f"the {self.info.kind} engine does not tell the logprobs of given tokens")

    def for_session(self, session: str) -> Engine:
        """What should sample for this session: one that has computed its earlier turns, if any has."""
        return self

    async def refresh(self) -> EngineInfo:
        """``info``, asked for again: what is behind an address may have been replaced."""
        return self.info

    @abstractmethod
    async def load(self, policy: Policy) -> None:
        """Serve this policy from the next token on. Requests in flight go on under it; keys and
        values computed under the old weights are never read by a request that begins later."""

    async def upload_files(self, policy: Policy) -> Policy:
        """The policy as the engine can load it: files on a machine that it does not see are sent to it."""
        return policy

    async def stage(self, transfer: WeightTransfer) -> Json:
        """Take in a part of a policy's weights beside those that are served; requests notice nothing. Parts
        of another policy that were staged before are given up. Returns what the sender is to know."""
        raise EngineError(f"the {self.info.kind} engine does not take weights over {transfer.route}")

    async def commit(self, policy: Policy) -> None:
        """Serve what was staged, in the way of ``load``. On an error the engine serves what it did before,
        and where that is gone nothing at all until something is loaded; ``status`` is true either way."""
        raise EngineError(f"the {self.info.kind} engine has no weights staged")

    @abstractmethod
    async def status(self) -> EngineStatus: ...

    def use_cores(self, count: int) -> None:  # noqa: B027 - a hint
        """Compute on so many CPU cores from the next step on. Engines that do not compute here ignore it."""

    @abstractmethod
    async def close(self) -> None: ...
