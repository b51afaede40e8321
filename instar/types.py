"""The words every room speaks. Frozen, no torch, no pydantic.

Arrays are numpy: token ids and versions int32, logprobs and advantages float32. Two values are
reserved: a missing logprob is NaN (never 0.0), and the version of a token that was not sampled
is ``NOT_SAMPLED``.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NotRequired, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Json = dict[str, Any]

NOT_SAMPLED = -1


_ids = random.Random(os.urandom(32))
"""Ids are unique, not secret; asking the system for each costs more than the rest of many a call."""


def new_id(prefix: str) -> str:
    """A fresh id, readable in a log: ``sess-18e7…``. It begins with the time, so that an index of ids
    grows at its end: anywhere else, a row would cost the store twice as much."""
    return f"{prefix}-{time.time_ns() >> 20:011x}{_ids.getrandbits(36):09x}"


# --- messages, as every dialect translates them -------------------------------------------------


class ToolCall(TypedDict):
    id: str
    name: str
    arguments: str
    """The JSON text as it was generated, not parsed and written again."""


class Message(TypedDict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class Tool(TypedDict):
    name: str
    description: str
    parameters: Json
    """A JSON schema."""


# --- sampling -----------------------------------------------------------------------------------

FinishReason = Literal["stop", "length", "aborted"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Ends the reply; the sampled stop token is part of it."""
    score: bool = True
    """False: nobody will look at the logprobs or train on them, so an engine that would have to ask for them
    apart leaves them missing."""

    @property
    def modifies_distribution(self) -> bool:
        """Whether sampling departs from the full softmax at temperature 1."""
        return self.temperature != 1.0 or self.top_p < 1.0 or self.top_k > 0


class TokenChunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an engine streams: one or more sampled tokens, each with its logprob and version.

    ``logprobs`` are those of the full softmax at temperature 1. ``behavior_logprobs`` are those of
    the distribution really sampled from, present when that was another one. The last chunk of a
    reply carries ``finish_reason``; ``stop`` names the stop string that ended it. Tokens of a
    matched stop string are in the stream, for they were sampled; the gateway trims the text.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    behavior_logprobs: list[float] | None = None
    finish_reason: FinishReason | None = None
    stop: str | None = None


# --- policies -----------------------------------------------------------------------------------

ArtifactKind = Literal["base", "adapter", "weights", "live", "remote"]


class Artifact(msgspec.Struct, frozen=True):
    """Where a published policy's weights are.

    ``base``: the base model itself. ``adapter``: a PEFT LoRA folder. ``weights``: a folder of full
    weights. ``live``: tensors held by a running process. ``remote``: a sampler in a cloud.
    """

    kind: ArtifactKind
    path: str = ""
    expires_at: float | None = None


class Policy(msgspec.Struct, frozen=True):
    policy_id: str
    version: int
    artifact: Artifact


class PolicyState(StrEnum):
    RESERVED = "reserved"
    PUBLISHED = "published"
    TOMBSTONED = "tombstoned"


# --- what an agent did --------------------------------------------------------------------------


class Channel(StrEnum):
    TRAIN = "train"
    VAL = "val"
    LIVE = "live"
    DATA = "data"
    """Brought in from exported data, to be trained on."""


class SessionStatus(StrEnum):
    OPEN = "open"
    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"
    """Superseded by another attempt at the same slot; never trained on."""


class GroupStatus(StrEnum):
    OPEN = "open"
    SCORING = "scoring"
    """Every slot has its final session, and some are still to be scored in the background."""
    READY = "ready"
    """Every slot has its final session, and each has been scored: the trainer may claim it."""
    DROPPED = "dropped"


class RewardSource(StrEnum):
    AGENT = "agent"
    RULE = "rule"
    JUDGE = "judge"
    HUMAN = "human"
    FALLBACK = "fallback"


class Task(msgspec.Struct, frozen=True):
    """One problem. ``data`` is what the agent and the reward rule are given."""

    task_id: str
    data: Json


@dataclass(frozen=True, slots=True)
class Group:
    """The sessions that try one task. ``index`` orders groups within a run and channel."""

    group_id: str
    run_id: str
    channel: Channel
    index: int
    size: int
    task: Task
    status: GroupStatus = GroupStatus.OPEN
    reason: str | None = None
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    session_id: str
    run_id: str
    agent_id: str
    policy_id: str
    channel: Channel
    status: SessionStatus = SessionStatus.OPEN
    group_id: str | None = None
    slot: int = 0
    """Place within the group; a refill or retry is another session in the same slot."""
    attempt: int = 0
    task_id: str | None = None
    reason: str | None = None
    """Why it failed or was abandoned."""
    seed: int | None = None
    sampling: Json = field(default_factory=dict[str, Any])
    """Sampling settings forced on every call of the session (``{"temperature": 0}``)."""
    metadata: Json = field(default_factory=dict[str, Any])
    external_id: str | None = None
    """What the agent itself calls this session, where it sends such an id."""
    created_at: float = 0.0
    ended_at: float | None = None


class CallStatus(StrEnum):
    OK = "ok"
    ABORTED = "aborted"


class Link(StrEnum):
    """How a call came to its place in the session's graph."""

    ROOT = "root"
    EXTENDS = "extends"
    """Its messages continue its parent's, and its prompt is the parent's tokens + new ones."""
    BRANCH = "branch"
    """The agent rewrote its history, or another conversation began (a sub-agent)."""
    SIBLING = "sibling"
    """The same request again: a retry, a regeneration, or one of ``n``."""


@dataclass(frozen=True, slots=True)
class Call:
    """One model call, exactly as it happened.

    ``prompt_ids`` and ``messages`` are whole here; a store keeps only what lies beyond the first
    ``base_tokens`` tokens and ``base_messages`` messages of the call ``base_id``, whose own
    sequence is its prompt + its sampled tokens, and its messages + its reply.
    """

    call_id: str
    session_id: str
    run_id: str
    agent_id: str
    policy_id: str
    request_id: str
    prompt_ids: Ids
    sampled_ids: Ids
    logprobs: Floats
    versions: Ids
    messages: tuple[Message, ...]
    reply: Message
    finish_reason: FinishReason
    tools: tuple[Tool, ...] = ()
    behavior_logprobs: Floats | None = None
    parent_id: str | None = None
    link: Link = Link.ROOT
    base_id: str | None = None
    base_tokens: int = 0
    base_messages: int = 0
    status: CallStatus = CallStatus.OK
    trainable: bool = True
    reason: str | None = None
    """Why it is not trainable, or was aborted."""
    dialect: str = "chat"
    model: str = ""
    """The name that the agent asked for."""
    client_key: str | None = None
    """The idempotency key of the request: the same one again is the same request again."""
    digests: bytes = b""
    """Requests are compared by it (`record.hashing`): keyed hashes of the tools, then of each message beyond
    ``base_messages`` and of the reply, as they were before redaction. Empty: made from the messages."""
    params: SamplingParams = SamplingParams()  # noqa: RUF009 — frozen, so one for all is safe
    started_at: float = 0.0
    first_token_at: float | None = None
    ended_at: float = 0.0

    @property
    def sequence(self) -> Ids:
        return np.concatenate([self.prompt_ids, self.sampled_ids])


@dataclass(frozen=True, slots=True)
class Reward:
    session_id: str
    value: float
    source: RewardSource
    scorer: str = ""
    call_id: str | None = None
    detail: Json = field(default_factory=dict[str, Any])
    created_at: float = 0.0
    reward_id: str | None = None
    """Adding a reward whose id is there already changes nothing."""
    scorer_version: str = ""
    """Of the rule, rubric or model that gave it: another version's word is another reward."""
    cost: float = 0.0
    """What it cost, in US dollars, where the price is known."""


class ScoreState(StrEnum):
    SCORED = "scored"
    FALLBACK = "fallback"
    """The scorer gave up, with a reason."""


@dataclass(frozen=True, slots=True)
class Score:
    """That a scorer is done with a session. Once per session and scorer."""

    session_id: str
    scorer: str
    """Name and version: ``judge:outcome@1f03``."""
    state: ScoreState
    attempts: int = 1
    reason: str | None = None
    """Why it gave up."""
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Tag:
    """What somebody, or a check, says of a session. One per session and name."""

    session_id: str
    name: str
    value: str = ""
    reason: str = ""
    author: str = ""
    created_at: float = 0.0


UNTRAINABLE = "untrainable"
"""The tag that keeps a session out of training."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """What a person says of a session, or of one of its calls."""

    feedback_id: str
    session_id: str
    call_id: str | None = None
    thumbs: int | None = None
    """1 or -1."""
    score: float | None = None
    text: str = ""
    correction: str | None = None
    """The answer that the call should have given."""
    correction_ids: Ids | None = None
    """The same as tokens, as the model would have sampled it behind the call's prompt."""
    author: str = ""
    created_at: float = 0.0


# --- what is trained on -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` sampled tokens of a call, from ``start`` on in the sample."""

    call_id: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One root-to-leaf walk through a session, flat. Index i speaks of token i given those before.

    A two-turn session whose prompt is ``[1 2]``, first reply ``[7 8]``, tool result ``[3]`` and
    second reply ``[9]``, all sampled by version 4, with advantage 0.5, is::

        token_ids   1    2    7    8    3    9
        mask        0    0    1    1    0    1
        logprobs    nan  nan  -.2  -.9  nan  -.1
        advantages  0    0    .5   .5   0    .5
        versions    -1   -1   4    4    -1   4
    """

    sample_key: str
    session_id: str
    token_ids: Ids
    mask: Floats
    logprobs: Floats
    advantages: Floats
    versions: Ids
    group_id: str | None = None
    behavior_logprobs: Floats | None = None
    spans: tuple[Span, ...] = ()
    aux: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    media: tuple[Json, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def trained_tokens(self) -> int:
        return int(self.mask.sum())


class StepState(StrEnum):
    """``claimed`` → ``submitted`` → ``saved`` → ``committed``; ``released`` after a crash."""

    CLAIMED = "claimed"
    SUBMITTED = "submitted"
    SAVED = "saved"
    COMMITTED = "committed"
    RELEASED = "released"


class ClaimOutcome(StrEnum):
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Claim:
    """That a sample was consumed: by a step, or dropped with a reason. Once per run and epoch."""

    run_id: str
    epoch: int
    sample_key: str
    session_id: str
    group_id: str | None
    outcome: ClaimOutcome
    step: int | None = None
    reason: str | None = None
    reward: float | None = None
    advantage: float | None = None
    staleness: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    run_id: str
    step: int
    state: StepState
    state_path: str | None = None
    version: int | None = None
    """The version that this step published."""
    metrics: Json = field(default_factory=dict[str, Any])
    updated_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A role of a run that is up: where it listens, which process it is, what it is doing."""

    run_id: str
    role: str
    name: str
    url: str
    pid: int
    doing: str = ""
    log: str = ""
    heartbeat: float = 0.0
