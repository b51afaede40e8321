"""Types that the store accepts or returns, in addition to those in `instar.types`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from instar import types

KeyKind = Literal["admin", "agent", "feedback"]
FEEDBACK_KEY_PREFIX = "feedback:"


def make_feedback_key(feedback_id: str) -> str:
    """Return the id of the feedback's reward, which is also the sample key of its correction."""
    return FEEDBACK_KEY_PREFIX + feedback_id


@dataclass(frozen=True, slots=True)
class Run:
    run_id: str
    policy_id: str
    config: types.Json
    status: str = "running"
    """``running``, ``finished``, ``stopped`` or ``failed``."""
    reason: str | None = None
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """The counts of a run that admission control and the progress display need. Groups and sessions are
    counted in one channel. Every group counts as open (also while it is scored), ready or consumed."""

    groups_open: int
    groups_ready: int
    groups_consumed: int
    """The number of groups that were dropped, or whose steps are all committed or published."""
    next_group_index: int
    committed_steps: int
    head_version: int
    sessions: dict[str, int] = field(default_factory=dict[str, int])
    """The number of sessions by status."""


@dataclass(frozen=True, slots=True)
class ProgressDetails:
    progress: Progress
    waiting_groups: int
    """The number of ready training groups without a claim in the epoch."""
    steps: int
    """The number of steps that are not released."""
    trained_steps: int
    """The number of steps whose update is in the policy's weights."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session with the totals that ``instar sessions ls`` shows."""

    session: types.Session
    call_count: int
    sampled_tokens: int
    reward: float | None
    """The session's latest reward, not counting rewards for individual calls."""
    seq: int = 0
    """The position in the order in which sessions were opened, the page cursor of `Store.sessions`."""


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Selects sessions that meet all conditions that are set."""

    channel: types.Channel | None = None
    status: types.SessionStatus | None = None
    ids: tuple[str, ...] = ()
    tags: tuple[tuple[str, str | None], ...] = ()
    """Required tags as (name, value); the value is None if any value matches."""
    without: tuple[str, ...] = ()
    """Names of tags that exclude a session."""
    reward_min: float | None = None
    """Minimum of the session's latest reward; ``reward_max`` is the maximum. If `scorer` or `source` is set,
    one of their rewards must be in the range instead."""
    reward_max: float | None = None
    scorer: str | None = None
    """A scorer that rewarded the session, with or without the scorer's version: ``judge:outcome@1f03``."""
    source: types.RewardSource | None = None
    """The source of one of the session's rewards."""
    task: str | None = None
    agent: str | None = None
    since: float | None = None
    """Only sessions that were opened at or after this Unix time."""
    until: float | None = None
    """Only sessions that were opened before this Unix time."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A call without the prefix that it shares with its base call ``base_id``."""

    call_id: str
    request_id: str
    parent_id: str | None
    link: types.Link
    base_id: str | None
    base_tokens: int
    base_messages: int
    prompt_tail: types.Ids
    """The prompt after the first ``base_tokens`` tokens. This array and ``sampled_ids`` are read-only."""
    sampled_ids: types.Ids
    message_count: int
    status: types.CallStatus
    trainable: bool
    reason: str | None
    client_key: str | None
    digests: bytes
    reply: types.Message
    messages: tuple[types.Message, ...] = ()
    """The messages after the first ``base_messages``. This and ``tools`` are empty if there are digests."""
    tools: tuple[types.Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyRow:
    """An API key, stored by its hash. The keys of sessions are stored with the sessions."""

    key_hash: str
    kind: KeyKind
    agent_id: str | None = None
    """The agent that the key is for. None for ``admin`` keys, and for ``feedback`` keys for all agents."""
    name: str = ""
    created_at: float = 0.0
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True)
class UnscoredSession:
    seq: int
    session: types.Session


@dataclass(frozen=True, slots=True)
class SessionRecord:
    session: types.Session
    calls: tuple[types.Call, ...] = ()
    rewards: tuple[types.Reward, ...] = ()
    scores: tuple[types.Score, ...] = ()
    tags: tuple[types.Tag, ...] = ()
    feedback: tuple[types.Feedback, ...] = ()


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """A version of a named dataset that was exported to the folder ``path``. ``hash`` is its content hash."""

    name: str
    version: int
    path: str
    hash: str
    manifest: types.Json
    created_at: float = 0.0
