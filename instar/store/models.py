"""Types that the store accepts or returns, in addition to those in `instar.types`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from instar import types

KeyKind = Literal["admin", "agent", "feedback"]
FEEDBACK_ID_PREFIX = "feedback:"
JUDGED_TAG = "judged-session"
"""The name of the tag of a session in which the run's own model judges another session. Its value is the
id of the judged session."""
RESAMPLED_TAG = "resampled-session"
"""The tag of a session that repeats the prompt of the live session in its value."""
RESAMPLED_PREFIX = "resampled/"


def make_resampled_group_id(session_id: str) -> str:
    """Return the id of the group with further replies to a prompt of the live session."""
    return RESAMPLED_PREFIX + session_id


def make_feedback_reward_id(feedback_id: str) -> str:
    """Return the id of the feedback's reward, which is also the sample key of its correction."""
    return FEEDBACK_ID_PREFIX + feedback_id


def is_correction_key(sample_key: str) -> bool:
    """Return True if the sample is the correction of a reply."""
    return sample_key.startswith(FEEDBACK_ID_PREFIX)


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
class PolicyVersion:
    """A version of a policy and its place in the lineage."""

    policy: types.Policy
    step: int
    """The training step whose weights the version has."""
    state: types.PolicyState
    stage: types.PolicyStage
    parent: int | None
    """The version from which this one was trained, or whose weights it serves again; None if not recorded."""
    promoted_at: float | None
    """The Unix time at which a person chose to serve the version, or None if nobody did."""
    updated_at: float
    reason: str | None = None

    @property
    def was_served(self) -> bool:
        """True if the version serves or served all sessions. A candidate that a later one replaced is retired
        without having been served."""
        return self.stage is types.PolicyStage.SERVING or self.promoted_at is not None


EvaluationDecision = Literal["promote", "reject", "more data", "superseded"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The comparison of a candidate with the version that was served at that time."""

    policy_id: str
    version: int
    incumbent: int
    """The serving version that the candidate is compared with."""
    number: int
    """The number of this evaluation in the lineage, counted from 1. It determines `alpha`."""
    alpha: float
    """The part of the lineage's error budget that this evaluation spends."""
    method: str
    """How held-out prompts are compared: ``rewards``, ``feedback`` or ``none``."""
    decision: EvaluationDecision = "more data"
    reason: str = ""
    results: types.Json = field(default_factory=dict[str, Any])
    """The count, mean difference and bounds of each evaluation set, by its name."""
    started_at: float = 0.0
    updated_at: float = 0.0


@dataclass(frozen=True, slots=True)
class EvaluationItem:
    """The scores of both versions on an item of an evaluation set."""

    policy_id: str
    version: int
    incumbent: int
    set_name: str
    item_key: str
    """The key of a sanity item, or the id of the session whose prompt was replayed."""
    candidate_score: float | None
    """None if the item could not be scored. It then does not count."""
    incumbent_score: float | None
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ActiveVersion:
    """A published version that serves requests now: all, those of canary sessions, or none visibly."""

    policy: types.Policy
    stage: types.PolicyStage


@dataclass(frozen=True, slots=True)
class ShadowReply:
    """A reply that a version in the stage `shadow` sampled to a live request, and that nobody has seen."""

    session_id: str
    call_id: str
    """The call with the prompt and the reply that was served."""
    policy_id: str
    version: int
    reply: types.Message
    sampled_ids: types.Ids
    logprobs: types.Floats
    finish_reason: types.FinishReason
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ShadowPair:
    """A shadow reply and the reply that was served to the same prompt."""

    shadow: ShadowReply
    served_reply: types.Message
    served_finish_reason: types.FinishReason


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of groups and sessions in one channel of a run, for admission control and the progress display.
    Each group counts as open, ready or consumed. Groups that are being scored count as open."""

    groups_open: int
    groups_ready: int
    groups_consumed: int
    """The number of groups that were dropped, or whose steps are all committed or published."""
    next_group_index: int
    committed_steps: int
    head_version: int
    """The newest serving version of the run's policy."""
    sessions: dict[str, int] = field(default_factory=dict[str, int])
    """The number of sessions by status."""


@dataclass(frozen=True, slots=True)
class ProgressDetails:
    progress: Progress
    waiting_groups: int
    """The number of ready training groups without a claim in the requested epoch."""
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
    """The session's number in order of opening, used as the page cursor of `Store.sessions`."""


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Selects sessions that meet all conditions that are set."""

    channel: types.Channel | None = None
    status: types.SessionStatus | None = None
    ids: tuple[str, ...] = ()
    tags: tuple[tuple[str, str | None], ...] = ()
    """Required tags as (name, value); the value is None if any value matches."""
    without: tuple[str, ...] = ()
    """Names of tags that a session must not have."""
    reward_min: float | None = None
    """The minimum of the session's latest reward, or of any reward from `scorer` or `source` if set."""
    reward_max: float | None = None
    """The maximum of the same reward."""
    scorer: str | None = None
    """The name of a scorer that rewarded the session, optionally with its version: ``judge:outcome@1f03``."""
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
    """A call without the prefix that it shares with its base call ``base_id``. Its arrays are read-only."""

    call_id: str
    request_id: str
    parent_id: str | None
    link: types.Link
    base_id: str | None
    base_tokens: int
    base_messages: int
    prompt_tail: types.Ids
    """The prompt after the first ``base_tokens`` tokens."""
    sampled_ids: types.Ids
    message_count: int
    status: types.CallStatus
    trainable: bool
    reason: str | None
    client_key: str | None
    digests: bytes
    reply: types.Message
    messages: tuple[types.Message, ...] = ()
    """The messages after the first ``base_messages``, or empty if the call has digests."""
    tools: tuple[types.Tool, ...] = ()
    """The tools, or empty if the call has digests."""


@dataclass(frozen=True, slots=True)
class StoredReply:
    """The reply of a call, without the call's prompt and messages."""

    call_id: str
    request_id: str
    session_id: str
    status: types.CallStatus
    reply: types.Message
    response_fields: types.Json | None = None
    """The data with which the gateway returns the response again, or None if it cannot."""


@dataclass(frozen=True, slots=True)
class KeyRow:
    """An API key, identified by its hash. The key of a session is stored with the session instead."""

    key_hash: str
    kind: KeyKind
    agent_id: str | None = None
    """The agent that the key is for. None for ``admin`` keys and ``feedback`` keys that cover all agents."""
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


ForgetCause = Literal["request", "retention"]


@dataclass(frozen=True, slots=True)
class ForgottenSession:
    """The record of a session whose data was deleted."""

    session_id: str
    run_id: str
    agent_id: str
    policy_id: str
    channel: types.Channel
    group_id: str | None
    calls: int
    """The number of deleted calls."""
    sampled_tokens: int
    cause: ForgetCause
    """`request` if a person deleted the session, or `retention` if it was older than the store keeps."""
    created_at: float
    """The Unix time at which the session was opened."""
    forgotten_at: float


@dataclass(frozen=True, slots=True)
class TrainedSession:
    """A step that trained on a session, according to its claims."""

    session_id: str
    run_id: str
    policy_id: str
    step: int
    state: types.StepState
    version: int | None
    """The policy version that the step published; None if it has not published one yet."""
    samples: int


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """A version of a named dataset that was exported to the folder ``path``. ``hash`` is its content hash."""

    name: str
    version: int
    path: str
    hash: str
    manifest: types.Json
    created_at: float = 0.0
