"""The engine interface: token ids in, token ids out.

Each engine runs in its own process behind `instar.engines.server`. Other processes use it through
`instar.engines.remote.RemoteEngine`, which implements the same interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from instar.errors import EngineError, EngineUnavailable, PolicyNotFound
from instar.types import (
    OPTIONAL_SAMPLING_FIELDS,
    ArtifactKind,
    Floats,
    Ids,
    Json,
    Policy,
    PolicyRef,
    SamplingParams,
    TokenChunk,
)

Prompt = Sequence[int] | Ids
"""Token ids. An int32 array is not copied."""

LiveRoute = Literal["ipc", "nccl", "ray"]
"""A weight transfer route that sends weights to an engine without writing files."""


class WeightTransfer(msgspec.Struct, frozen=True):
    """A message that tells an engine how to get a policy's weights, or that tests whether the route works."""

    policy: Policy
    route: LiveRoute
    body: Json
    """The route-specific content, written by `instar.sync` and read by the engine."""


class EngineInfo(msgspec.Struct, frozen=True):
    """The fixed capabilities of an engine process, or those that all engines of a pool have in common."""

    kind: str
    model: str
    vocab_size: int
    max_context: int
    artifacts: tuple[ArtifactKind, ...]
    """The kinds of policy artifacts that ``load`` accepts."""
    streams: bool = True
    """False if a reply arrives as one chunk."""
    versions_per_token: bool = True
    """False if all tokens of a reply have the same policy version."""
    can_score: bool = False
    """True if ``logprobs`` is implemented."""
    constrains_output: bool = False
    """True if ``SamplingParams.constraint`` is supported."""
    sampling_fields: tuple[str, ...] = OPTIONAL_SAMPLING_FIELDS
    """The supported ones of these fields."""
    serves_several_policies: bool = False
    """True if requests can name a policy, and ``keep`` and ``unload`` are implemented."""
    routes: tuple[LiveRoute, ...] = ()
    """The weight transfer routes that ``stage`` supports."""

    def intersect(self, other: EngineInfo) -> EngineInfo:
        """Return the capabilities that both engines have."""
        return msgspec.structs.replace(
            self,
            kind=self.kind if self.kind == other.kind else "mixed",
            artifacts=tuple(kind for kind in self.artifacts if kind in other.artifacts),
            streams=self.streams and other.streams,
            versions_per_token=self.versions_per_token and other.versions_per_token,
            can_score=self.can_score and other.can_score,
            constrains_output=self.constrains_output and other.constrains_output,
            sampling_fields=tuple(name for name in self.sampling_fields if name in other.sampling_fields),
            serves_several_policies=self.serves_several_policies and other.serves_several_policies,
            routes=tuple(route for route in self.routes if route in other.routes),
        )


class EngineStatus(msgspec.Struct):
    version: int
    """The version of the served policy, or -1 if a weight change failed and no policy is served."""
    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    """The number of tokens generated since the engine started."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The number of prompt tokens whose keys and values were in the KV cache."""
    draining: bool = False
    """True if the engine finishes its current replies but rejects new requests."""
    policies: tuple[PolicyRef, ...] = ()
    """The loaded policies that requests can name, in order. The base model, which is version 0 of a
    policy without an initial adapter, is not listed. Empty if the engine serves only one policy."""


def one_policy_error(info: EngineInfo) -> PolicyNotFound:
    return PolicyNotFound(
        f"The {info.kind} engine serves only one policy version at a time; do not name a version."
    )


class Engine(ABC):
    _info: EngineInfo | None = None

    async def start(self, log_path: Path, report: Callable[[str], None]) -> None:  # noqa: B027 - optional
        """Start the engine. The process that owns it calls this before any other method. ``report`` writes a
        log line. ``log_path`` is this process's log file; a child process logs to a file next to it."""

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise self._not_ready_error()
        return self._info

    def _not_ready_error(self) -> EngineError:
        return EngineUnavailable("The engine has not responded yet; try again when it is ready.")

    @abstractmethod
    def generate(
        self, prompt_ids: Prompt, params: SamplingParams, policy: PolicyRef | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Stream a reply. Only the last chunk has a ``finish_reason``. Closing the iterator (``aclose``) or
        cancelling its consumer cancels the request. If ``policy`` is None, the served policy replies. Else
        this loaded version replies to the end, whatever is loaded meanwhile. Raises PolicyNotFound if it is
        not loaded, and ConstraintError if ``params.constraint`` cannot be enforced."""

    async def logprobs(self, token_ids: Prompt, policy: PolicyRef | None = None) -> Floats:
        """Return the logprobs of at most ``max_context`` tokens (NaN at index 0) under the served policy, or
        under the loaded version ``policy``. Raises PolicyNotFound if it is not loaded."""
        raise EngineError(f"The {self.info.kind} engine does not compute prompt logprobs.")

    def for_session(self, session: str) -> Engine:
        """Return the engine for a session, preferably one that has cached the session's earlier turns."""
        return self

    async def refresh(self) -> EngineInfo:
        """Fetch ``info`` again and return it. A different engine may have started at the same address."""
        return self.info

    @abstractmethod
    async def load(self, policy: Policy) -> None:
        """Serve this policy. Requests in flight that do not name a policy continue under it, or finish under
        the old policy if ``info.versions_per_token`` is False. Later requests never reuse cached keys and
        values that were computed under other weights. If the engine serves several policies, the old ones
        stay available until the limit is reached; then the least recently used ones are unloaded."""

    async def keep(self, policy: Policy) -> None:
        """Make a policy available to requests that name it, without serving it to others. If the limit is
        reached, the least recently used policy that no request uses is unloaded. Raises PoliciesInUse if
        requests use all of them. A policy that is already loaded is not read again, unless its sampler on a
        training service was exported again."""
        raise one_policy_error(self.info)

    async def unload(self, policy: PolicyRef) -> None:
        """Make a policy unavailable to new requests. Its memory is freed when its last request has finished.
        Raises PolicyNotFound if it is not loaded, and EngineError if it is the served policy."""
        raise one_policy_error(self.info)

    async def upload_files(self, policy: Policy) -> Policy:
        """Upload the policy's files if the engine cannot read the local folder. Return the policy with the
        path on the engine's machine."""
        return policy

    async def stage(self, transfer: WeightTransfer) -> Json:
        """Handle a transfer message without affecting requests, and return the response for the sender.
        Staging weights for one policy discards the staged weights of other policies."""
        raise EngineError(f"The {self.info.kind} engine does not accept weights over {transfer.route}.")

    async def commit(self, policy: Policy) -> None:
        """Serve the staged weights, as ``load`` does. After a failure, the engine serves the previous policy,
        or no policy (version -1) if the previous weights were overwritten."""
        raise EngineError(f"The {self.info.kind} engine does not support live weight updates.")

    @abstractmethod
    async def status(self) -> EngineStatus: ...

    def use_cores(self, count: int) -> None:  # noqa: B027 - a hint
        """Compute on ``count`` CPU cores, starting with the next step. Engines with a configured number of
        threads and engines that do not compute in this process ignore this call."""

    @abstractmethod
    async def close(self) -> None: ...
