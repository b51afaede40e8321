"""The rows that a store returns, in addition to the types in `instar.types`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from instar.types import (
    Call,
    CallStatus,
    Channel,
    Feedback,
    Ids,
    Json,
    Link,
    Message,
    Reward,
    RewardSource,
    Score,
    Session,
    SessionStatus,
    Tag,
    Tool,
)

KeyKind = Literal["admin", "agent"]
FEEDBACK_KEY_PREFIX = "feedback:"


def feedback_key(feedback_id: str) -> str:
    """Return the key of the reward of a feedback, under which its correction is also claimed as a sample."""
    return FEEDBACK_KEY_PREFIX + feedback_id


@dataclass(frozen=True, slots=True)
class Run:
    run_id: str
    policy_id: str
    config: Json
    status: str = "running"
    """``running``, ``finished``, ``stopped`` or ``failed``."""
    reason: str | None = None
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """The counts that admission control and the display need, read together."""

    groups_open: int
    groups_ready: int
    """The number of ready groups that are neither consumed by a committed step nor dropped."""
    groups_consumed: int
    """The number of groups that were dropped, or claimed by a step that is committed or has published its
    version."""
    next_group_index: int
    committed_steps: int
    head_version: int
    sessions: dict[str, int] = field(default_factory=dict[str, int])
    """The number of sessions by status."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A line of ``instar sessions ls``."""

    session: Session
    calls: int
    sampled_tokens: int
    reward: float | None
    """The session's latest reward; rewards of single calls are not considered."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    seq: int = 0
    """The session's position in the order in which sessions were opened; the bounds of a page refer to it."""


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Selects the sessions that meet every condition that is set."""

    channel: Channel | None = None
    status: SessionStatus | None = None
    ids: tuple[str, ...] = ()
    tags: tuple[tuple[str, str | None], ...] = ()
    """Required tags as (name, value); the value is None if any value matches."""
    without: tuple[str, ...] = ()
    """Names of tags that exclude a session."""
    reward_min: float | None = None
    """The lowest value of the session's latest reward or, with `scorer` or `source`, of any of their
    rewards."""
    reward_max: float | None = None
    scorer: str | None = None
    """A scorer that rewarded the session, with or without the scorer's version: ``judge:outcome@1f03``."""
    source: RewardSource | None = None
    """The source of one of the session's rewards."""
    task: str | None = None
    agent: str | None = None
    since: float | None = None
    """The earliest time at which the session may have been opened."""
    until: float | None = None
    """The time before which the session must have been opened."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A call without the prefix that it shares with its base call. Message graphs are built from these."""

    call_id: str
    request_id: str
    parent_id: str | None
    link: Link
    base_id: str | None
    base_tokens: int
    base_messages: int
    prompt_tail: Ids
    """The prompt after the first ``base_tokens`` tokens; read-only, like the sampled ids."""
    sampled_ids: Ids
    message_count: int
    status: CallStatus
    trainable: bool
    reason: str | None
    client_key: str | None
    digests: bytes
    reply: Message
    messages: tuple[Message, ...] = ()
    """The messages after the first ``base_messages``. Messages and tools are loaded only if there are no
    digests."""
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyRow:
    """An API key, stored by its hash. Session keys are stored with their sessions."""

    key_hash: str
    kind: KeyKind
    agent_id: str | None = None
    """The agent that an ``agent`` key opens sessions for; None for an ``admin`` key."""
    name: str = ""
    created_at: float = 0.0
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True)
class UnscoredSession:
    """A session without a score by some scorer. ``seq`` orders sessions as they were opened."""

    seq: int
    session: Session


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session with its calls and annotations."""

    session: Session
    calls: tuple[Call, ...] = ()
    rewards: tuple[Reward, ...] = ()
    scores: tuple[Score, ...] = ()
    tags: tuple[Tag, ...] = ()
    feedback: tuple[Feedback, ...] = ()


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """A named version of exported data: the files in the folder ``path`` with content hash ``hash``."""

    name: str
    version: int
    path: str
    hash: str
    manifest: Json
    created_at: float = 0.0
