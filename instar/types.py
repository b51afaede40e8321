"""The data types shared by all packages. Importing them loads neither torch nor pydantic.

Arrays are numpy arrays: token ids and versions are int32, logprobs and advantages are float32. A missing
logprob is NaN (never 0.0), and the version of a token that was not sampled is ``NOT_SAMPLED``.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from instar.model_types import BIAS_RANGE as BIAS_RANGE
from instar.model_types import FULL_SOFTMAX as FULL_SOFTMAX
from instar.model_types import OPTIONAL_SAMPLING_FIELDS as OPTIONAL_SAMPLING_FIELDS
from instar.model_types import SAMPLING_RANGES as SAMPLING_RANGES
from instar.model_types import Artifact as Artifact
from instar.model_types import ArtifactKind as ArtifactKind
from instar.model_types import CallForm as CallForm
from instar.model_types import Endpoint as Endpoint
from instar.model_types import FinishReason as FinishReason
from instar.model_types import Floats as Floats
from instar.model_types import Ids as Ids
from instar.model_types import Json as Json
from instar.model_types import Message as Message
from instar.model_types import OutputConstraint as OutputConstraint
from instar.model_types import Policy as Policy
from instar.model_types import PolicyRef as PolicyRef
from instar.model_types import PolicyStage as PolicyStage
from instar.model_types import PolicyState as PolicyState
from instar.model_types import SamplingParams as SamplingParams
from instar.model_types import TokenChunk as TokenChunk
from instar.model_types import Tool as Tool
from instar.model_types import ToolCall as ToolCall
from instar.step_types import SINGLE_EPOCH as SINGLE_EPOCH
from instar.step_types import Claim as Claim
from instar.step_types import ClaimOutcome as ClaimOutcome
from instar.step_types import Step as Step
from instar.step_types import StepState as StepState

NOT_SAMPLED = -1

_id_generator = random.Random(os.urandom(32))
"""Generates ids without a system call for each one, unlike `secrets`. Ids need not be secret."""


def new_id(prefix: str) -> str:
    """Return a new id, such as ``sess-18e7…``. It starts with the time, which makes inserts twice as fast."""
    return f"{prefix}-{time.time_ns() >> 20:011x}{_id_generator.getrandbits(36):09x}"


# --- runs, sessions and calls -------------------------------------------------------------------


class Channel(StrEnum):
    TRAIN = "train"
    VAL = "val"
    LIVE = "live"
    DATA = "data"
    """Sessions that were imported as training data."""
    RESAMPLED = "resampled"
    """Sessions that the trainer sampled for the prompts of live sessions."""


class SessionStatus(StrEnum):
    OPEN = "open"
    COMPLETED = "completed"
    FAILED = "failed"
    ABANDONED = "abandoned"
    """The session was given up, for example after a transient error, and is never used for training."""


class GroupStatus(StrEnum):
    OPEN = "open"
    SCORING = "scoring"
    """Every slot has its final session, and some of the sessions are still being scored."""
    READY = "ready"
    """Every slot has its final session, and all sessions are scored. The trainer may claim the group."""
    DROPPED = "dropped"


class RewardSource(StrEnum):
    AGENT = "agent"
    RULE = "rule"
    JUDGE = "judge"
    HUMAN = "human"
    FALLBACK = "fallback"


class Task(msgspec.Struct, frozen=True):
    """A problem for the agent. The agent and the reward rule receive its ``data``."""

    task_id: str
    data: Json


@dataclass(frozen=True, slots=True)
class Group:
    """The sessions that attempt one task. ``index`` orders groups within a run and channel."""

    group_id: str
    run_id: str
    channel: Channel
    index: int
    size: int
    task: Task
    status: GroupStatus = GroupStatus.OPEN
    reason: str | None = None
    created_at: float = 0.0
    deadline_seconds: float | None = None
    """How long each session may be open. None for the groups of a rollout, which has its own timeout."""

    def accepts(self, session: Session) -> bool:
        """Return True if the session has this group's run, channel and id, and one of its slots."""
        has_same_origin = (session.run_id, session.channel) == (self.run_id, self.channel)
        return has_same_origin and session.group_id == self.group_id and 0 <= session.slot < self.size


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
    """The position within the group. A retry or refill is a new session in the same slot."""
    attempt: int = 0
    """Number of earlier sessions in the slot."""
    task_id: str | None = None
    reason: str | None = None
    """Why the session failed, was abandoned or was ended as idle."""
    seed: int | None = None
    sampling: Json = field(default_factory=dict[str, Any])
    """Sampling settings that override those of every call in the session, such as ``{"temperature": 0}``."""
    metadata: Json = field(default_factory=dict[str, Any])
    external_id: str | None = None
    """The id that the agent itself uses for this session, if it sends one."""
    created_at: float = 0.0
    ended_at: float | None = None
    canary_version: int | None = None
    """The version of the policy that serves the session while it is a canary; None for other sessions."""


class CallStatus(StrEnum):
    OK = "ok"
    ABORTED = "aborted"


class Link(StrEnum):
    """How a call relates to the earlier calls of its session."""

    ROOT = "root"
    EXTENDS = "extends"
    """The messages continue the parent's messages, and the prompt continues the parent's tokens."""
    BRANCH = "branch"
    """The agent rewrote its history, or started a separate conversation (a sub-agent)."""
    SIBLING = "sibling"
    """The same request again: a retry, a regeneration, or one of ``n`` replies."""


@dataclass(frozen=True, slots=True)
class Call:
    """One model call, with its complete prompt and messages.

    A store keeps only what follows the first ``base_tokens`` tokens and ``base_messages`` messages of the
    base call ``base_id``. The tokens of the base call are its prompt and its sampled tokens, and its messages
    include its reply. Stores and exports derive their columns from these fields (`column_types`).
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
    """The logprobs of the sampled tokens under the full softmax at temperature 1."""
    versions: Ids
    messages: tuple[Message, ...]
    reply: Message
    finish_reason: FinishReason
    tools: tuple[Tool, ...] = ()
    behavior_logprobs: Floats | None = None
    """The logprobs under the distribution that was sampled from; None if this is the full softmax."""
    parent_id: str | None = None
    link: Link = Link.ROOT
    base_id: str | None = None
    base_tokens: int = 0
    base_messages: int = 0
    status: CallStatus = CallStatus.OK
    trainable: bool = True
    reason: str | None = None
    """Why the call is not trainable or was aborted."""
    dialect: str = "chat"
    model: str = ""
    """The model name that the agent requested."""
    client_key: str | None = None
    """The idempotency key of the request. A request with the same key is a retry of this request."""
    digests: bytes = b""
    """Keyed hashes of the tools, of each message after ``base_messages`` and of the reply, before redaction
    (`record.hashing`), for comparing requests. If empty, they are computed from the messages."""
    params: SamplingParams = SamplingParams()  # noqa: RUF009 — frozen, so it can be shared
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
    """If set, adding another reward with the same id has no effect."""
    scorer_version: str = ""
    """The version of the rule, rubric or model. Each version of a scorer adds its own reward."""
    cost: float = 0.0
    """The cost of computing the reward, in US dollars; 0 if the price is not known."""


class ScoreState(StrEnum):
    SCORED = "scored"
    FALLBACK = "fallback"
    """The scorer failed. The session gets the reward `scoring.fallback`, or none if that is not set."""


@dataclass(frozen=True, slots=True)
class Score:
    """Records that a scorer scored a session or failed. There is one score per session and scorer."""

    session_id: str
    scorer: str
    """The scorer's name and version: ``judge:outcome@1f03``."""
    state: ScoreState
    attempts: int = 1
    reason: str | None = None
    """Why the scorer failed."""
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Tag:
    """A label that a person or a check puts on a session. There is one per session and name."""

    session_id: str
    name: str
    value: str = ""
    reason: str = ""
    author: str = ""
    created_at: float = 0.0


UNTRAINABLE = "untrainable"
"""The name of the tag that excludes a session from training."""
AGENT_FEEDBACK_PREFIX = "agent:"


@dataclass(frozen=True, slots=True)
class Feedback:
    """A person's or an agent's feedback on a session, or on one of its calls."""

    feedback_id: str
    """Starts with `AGENT_FEEDBACK_PREFIX` if an agent sent the feedback."""
    session_id: str
    call_id: str | None = None
    thumbs: int | None = None
    """1 for thumbs up, -1 for thumbs down."""
    score: float | None = None
    text: str = ""
    correction: str | None = None
    """The reply that the call should have returned."""
    correction_ids: Ids | None = None
    """The tokens of the correction, as the model would have sampled them after the call's prompt."""
    author: str = ""
    created_at: float = 0.0
    preferred: str | None = None
    """`this` if a person prefers the reply of the call to another reply, or `other` if they prefer the other
    one; None if nothing was compared."""
    other_call_id: str | None = None
    """The call of the other reply, or None if it is a text."""
    other_text: str | None = None
    other_ids: Ids | None = None
    """The tokens of the other reply, as they follow the call's prompt. None if it cannot be trained on."""

    @property
    def source(self) -> RewardSource:
        is_from_agent = self.feedback_id.startswith(AGENT_FEEDBACK_PREFIX)
        return RewardSource.AGENT if is_from_agent else RewardSource.HUMAN


# --- training -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` consecutive sampled tokens of a call, starting at position ``start`` of the sample."""

    call_id: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One root-to-leaf path through the calls of a session. Entry i of each array describes token i.

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
    """The `Call.behavior_logprobs` of the calls, or None if no call has any."""
    spans: tuple[Span, ...] = ()
    aux: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """Other per-token values by name, such as the reference model's logprobs."""
    media: tuple[Json, ...] = ()
    """Media in the prompt. Text-only backends reject samples with media."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def trained_tokens(self) -> int:
        return int(self.mask.sum())
