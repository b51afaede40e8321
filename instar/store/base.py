"""What a store is. Every variant passes tests/unit/store/conformance.py.

Writes are durable when they return. Methods are coroutines; a variant may run its work elsewhere,
and groups concurrent writes into one commit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from instar.types import (
    Call,
    CallStatus,
    Channel,
    Claim,
    Endpoint,
    Feedback,
    Group,
    GroupStatus,
    Ids,
    Json,
    Link,
    Message,
    Policy,
    Reward,
    RewardSource,
    Score,
    Session,
    SessionStatus,
    Step,
    StepState,
    Tag,
    Tool,
)

KeyKind = Literal["admin", "agent"]
CORRECTION_KEY_PREFIX = "feedback:"


def correction_key(feedback_id: str) -> str:
    """The sample key of a correction."""
    return CORRECTION_KEY_PREFIX + feedback_id


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
    """What admission and the display need, in one cheap read."""

    groups_open: int
    groups_ready: int
    """Ready and not yet consumed by a committed step or dropped."""
    groups_consumed: int
    """Claimed by a step that is committed or has published its version, or dropped."""
    next_group_index: int
    committed_steps: int
    head_version: int
    sessions: dict[str, int] = field(default_factory=dict[str, int])
    """Count by status."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A line of ``instar sessions ls``."""

    session: Session
    calls: int
    sampled_tokens: int
    reward: float | None
    """The session's latest, rewards of single calls left aside."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    seq: int = 0
    """Orders sessions as they were opened: where the page before this row ends."""


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Which sessions: those for which all that is given holds."""

    channel: Channel | None = None
    status: SessionStatus | None = None
    ids: tuple[str, ...] = ()
    tags: tuple[tuple[str, str | None], ...] = ()
    """Names, each with the value that it must have, if any."""
    without: tuple[str, ...] = ()
    """Names of tags that it must not have."""
    reward_min: float | None = None
    """Of the latest reward of the session; where `scorer` or `source` is given, of any of theirs."""
    reward_max: float | None = None
    scorer: str | None = None
    """One that gave it a reward, with or without its version: ``judge:outcome@1f03``."""
    source: RewardSource | None = None
    """Where one of its rewards comes from."""
    task: str | None = None
    agent: str | None = None
    since: float | None = None
    """Opened at that time or later."""
    until: float | None = None
    """Opened before that time."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A call without what it shares with its base: what a session's message graph is made from."""

    call_id: str
    request_id: str
    parent_id: str | None
    link: Link
    base_id: str | None
    base_tokens: int
    base_messages: int
    prompt_tail: Ids
    """The prompt beyond ``base_tokens``. Not to be written to, nor are the sampled ids."""
    sampled_ids: Ids
    message_count: int
    status: CallStatus
    trainable: bool
    reason: str | None
    client_key: str | None
    digests: bytes
    reply: Message
    messages: tuple[Message, ...] = ()
    """Those beyond ``base_messages``, and the tools: given only where there are no digests."""
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyRow:
    """An API key as it is kept: by its hash. Session keys are kept with their sessions."""

    key_hash: str
    kind: KeyKind
    agent_id: str | None = None
    """Whose sessions an ``agent`` key opens; None for an ``admin`` key."""
    name: str = ""
    created_at: float = 0.0
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True)
class UnscoredSession:
    """A session that a scorer is still to see. ``seq`` orders sessions as they were opened."""

    seq: int
    session: Session


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session with all that happened in it and was said of it."""

    session: Session
    calls: tuple[Call, ...] = ()
    rewards: tuple[Reward, ...] = ()
    scores: tuple[Score, ...] = ()
    tags: tuple[Tag, ...] = ()
    feedback: tuple[Feedback, ...] = ()


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """Exported data, known by name: the files in the folder ``path``, whose content hashes to ``hash``."""

    name: str
    version: int
    path: str
    hash: str
    manifest: Json
    created_at: float = 0.0


class Store(ABC):
    @abstractmethod
    async def close(self) -> None: ...

    # runs
    @abstractmethod
    async def put_run(self, run: Run) -> None:
        """Insert, or replace what is there under the same id."""

    @abstractmethod
    async def run(self, run_id: str) -> Run | None: ...

    @abstractmethod
    async def runs(self) -> list[Run]: ...

    # groups and sessions
    @abstractmethod
    async def open_group(self, group: Group) -> None: ...

    @abstractmethod
    async def close_group(self, group_id: str, status: GroupStatus, reason: str | None = None) -> None: ...

    @abstractmethod
    async def group(self, group_id: str) -> Group | None: ...

    @abstractmethod
    async def groups(
        self,
        run_id: str,
        channel: Channel,
        status: GroupStatus | None = None,
        *,
        unclaimed_in_epoch: int | None = None,
    ) -> list[Group]:
        """By index. ``unclaimed_in_epoch`` leaves out those with a claim in that epoch."""

    @abstractmethod
    async def open_session(self, session: Session, key_hash: str | None = None) -> None:
        """Raises ConflictError when the id is taken."""

    @abstractmethod
    async def session(self, session_id: str) -> Session | None: ...

    @abstractmethod
    async def session_by_key(self, key_hash: str) -> Session | None: ...

    @abstractmethod
    async def session_by_external_id(self, run_id: str, agent_id: str, external_id: str) -> Session | None:
        """The newest open one that the agent calls so."""

    @abstractmethod
    async def session_by_tail(self, run_id: str, agent_id: str, keys: Sequence[bytes]) -> str | None:
        """The id of the open live session with a call of one of these tail keys: of the first key that
        has one, and the newest such call."""

    @abstractmethod
    async def idle_sessions(self, run_id: str, before: float) -> list[str]:
        """Open live sessions whose last call ended before that time, or which were created before it and
        have none."""

    @abstractmethod
    async def end_session(
        self,
        session_id: str,
        status: SessionStatus,
        reason: str | None = None,
        rewards: Sequence[Reward] = (),
        metadata: Json | None = None,
        scores: Sequence[Score] = (),
    ) -> bool:
        """End an open session with its rewards and scores, in one transaction. False if it had ended already
        (nothing is changed then). ``metadata`` is merged into the session's."""

    @abstractmethod
    async def last_ended_seq(self, run_id: str, channels: Sequence[Channel]) -> int:
        """The ``seq`` up to which every session of these channels has ended."""

    @abstractmethod
    async def sessions(
        self,
        run_id: str | None = None,
        *,
        group_id: str | None = None,
        channel: Channel | None = None,
        status: SessionStatus | None = None,
        where: SessionFilter | None = None,
        before: int | None = None,
        after: int | None = None,
        limit: int | None = None,
    ) -> list[SessionRow]:
        """Oldest first; with ``limit``, the newest so many. ``before`` and ``after`` are the ``seq`` of rows
        that bound the page: with ``after`` and ``limit``, the oldest so many behind it."""

    @abstractmethod
    async def sessions_by_group(self, group_ids: Sequence[str]) -> dict[str, list[Session]]:
        """The sessions of groups, oldest first; an empty list for a group without any."""

    # calls
    @abstractmethod
    async def add_calls(
        self,
        calls: Sequence[Call],
        *,
        opening: Session | None = None,
        key_hash: str | None = None,
        tail_keys: Mapping[str, bytes] | None = None,
    ) -> None:
        """All or none. A call's ``base_id`` must be stored before or earlier in the sequence.
        Adding a call to a session that has ended is allowed: it happened.

        ``opening`` is opened first, in the same transaction, with ``key_hash`` as its key; raises
        ConflictError when its id is taken. ``tail_keys`` maps call ids to the keys of `session_by_tail`."""

    @abstractmethod
    async def call(self, call_id: str) -> Call | None: ...

    @abstractmethod
    async def calls(self, session_id: str) -> list[Call]:
        """In the order they were committed, prompts and messages whole."""

    @abstractmethod
    async def calls_by_session(self, session_ids: Sequence[str]) -> dict[str, list[Call]]:
        """As `calls`, of several sessions; an empty list for one without any."""

    @abstractmethod
    async def calls_by_request(self, request_id: str) -> list[Call]:
        """The calls of one request, several where it asked for several replies."""

    @abstractmethod
    async def call_deltas(self, session_id: str) -> list[CallDelta]:
        """In the order they were committed. Costs what was stored, not the sum of the prompts."""

    # rewards and what was said of sessions
    @abstractmethod
    async def add_rewards(self, rewards: Sequence[Reward]) -> None:
        """One whose ``reward_id`` is there already is left as it is."""

    @abstractmethod
    async def rewards(self, session_id: str) -> list[Reward]: ...

    @abstractmethod
    async def rewards_by_session(self, session_ids: Sequence[str]) -> dict[str, list[Reward]]:
        """In the order they were given; an empty list for a session without any."""

    @abstractmethod
    async def unscored_sessions(
        self,
        run_id: str,
        scorer: str,
        channels: Sequence[Channel],
        *,
        after: int = 0,
        limit: int = 256,
        pending_only: bool = False,
    ) -> list[UnscoredSession]:
        """Completed sessions without a score by this scorer, oldest first, from those behind ``after``.
        ``awaited``: none of a group that is ready, or was dropped, nor one that another version of the scorer
        has scored."""

    @abstractmethod
    async def record_scores(self, scores: Sequence[Score], rewards: Sequence[Reward]) -> bool:
        """All or none, in one transaction. False, and nothing is changed, where one of the sessions has a
        score by that scorer already."""

    @abstractmethod
    async def scores(self, session_ids: Sequence[str]) -> dict[str, list[Score]]: ...

    @abstractmethod
    async def score_counts(self, run_id: str) -> dict[str, dict[str, int]]:
        """Scorer → state → sessions."""

    @abstractmethod
    async def add_tags(self, tags: Sequence[Tag]) -> None:
        """Insert, or replace those of the same session and name."""

    @abstractmethod
    async def remove_tags(self, session_ids: Sequence[str], name: str) -> int:
        """How many there were."""

    @abstractmethod
    async def tags(self, session_ids: Sequence[str]) -> dict[str, list[Tag]]:
        """By name; an empty list for a session without any."""

    @abstractmethod
    async def add_feedback(self, feedback: Feedback, rewards: Sequence[Reward] = ()) -> bool:
        """With the rewards that follow from it, in one transaction. False, and nothing is changed, where
        its id is there already."""

    @abstractmethod
    async def feedback(
        self, run_id: str, *, session_id: str | None = None, corrected: bool = False
    ) -> list[Feedback]:
        """Oldest first. ``corrected``: only what comes with a correction."""

    @abstractmethod
    async def corrections(self, run_id: str, epoch: int, limit: int) -> list[Feedback]:
        """Corrections that can be trained on and whose `correction_key` has no claim in that epoch, oldest
        first. Not of sessions for evaluation, nor of those tagged as untrainable."""

    @abstractmethod
    async def judgment(self, key: bytes) -> Json | None: ...

    @abstractmethod
    async def put_judgment(self, key: bytes, run_id: str, answer: Json, cost: float = 0.0) -> None:
        """The first answer to a question stands."""

    @abstractmethod
    async def judgment_totals(self, run_id: str) -> tuple[int, float]:
        """(answers paid for, their cost)"""

    # data that was put aside, and known by name
    @abstractmethod
    async def put_records(self, groups: Sequence[Group], records: Sequence[SessionRecord]) -> None:
        """Sessions as they were elsewhere, with the groups that they belong to, all or none. Raises
        ConflictError when the id of one, or of anything in it, is taken."""

    @abstractmethod
    async def put_dataset(self, name: str, path: str, hash: str, manifest: Json) -> DatasetRow:
        """As the next version of that name; the newest one itself, now at this path, where it has the same
        hash."""

    @abstractmethod
    async def dataset(self, name: str, version: int | None = None) -> DatasetRow | None:
        """Default: the newest."""

    @abstractmethod
    async def datasets(self) -> list[DatasetRow]:
        """By name and version."""

    @abstractmethod
    async def remove_dataset(self, name: str, version: int | None = None) -> int:
        """Forget that version, or all of them; returns how many there were. Files are left alone."""

    # policies: version 0 is the base model and always there
    @abstractmethod
    async def reserve_version(self, policy_id: str, run_id: str, step: int) -> int:
        """The next number of the lineage, never used before."""

    @abstractmethod
    async def publish(self, policy: Policy) -> None:
        """A reserved version has its artifact and becomes the head."""

    @abstractmethod
    async def tombstone(self, policy_id: str, version: int, reason: str) -> None:
        """A version that a crash abandoned. The head falls back to the newest published one."""

    @abstractmethod
    async def reserved_versions(self, policy_id: str) -> list[tuple[int, int]]:
        """(version, step) of those reserved and neither published nor tombstoned."""

    @abstractmethod
    async def steps_by_version(self, policy_id: str) -> dict[int, int]:
        """The step that made each version, whatever became of it."""

    @abstractmethod
    async def latest_policy(self, policy_id: str) -> Policy:
        """The newest published version; version 0 with a ``base`` artifact when there is none."""

    @abstractmethod
    async def published_policies(self, policy_id: str) -> list[tuple[Policy, int]]:
        """(policy, step that made it), oldest first."""

    # training steps
    @abstractmethod
    async def claim_step(self, run_id: str, step: int, claims: Sequence[Claim]) -> None:
        """Record the step as claimed with the claims of every group it consumes, all or none: samples
        trained, and those dropped with it (a group without signal). Raises ConflictError when a sample is
        claimed already in that run and epoch."""

    @abstractmethod
    async def drop_samples(self, claims: Sequence[Claim]) -> None:
        """Record samples as dropped (stale, late), each with its reason. One that names a step is released
        with it."""

    @abstractmethod
    async def advance_step(
        self,
        run_id: str,
        step: int,
        state: StepState,
        *,
        state_path: str | None = None,
        version: int | None = None,
        metrics: Json | None = None,
    ) -> None:
        """Move a step to a later state, or add to what is known of it in the same one. Raises StoreError
        on a move backwards."""

    @abstractmethod
    async def release_steps(self, run_id: str, after: int) -> list[int]:
        """Recovery: forget every unsaved step (claimed, submitted) later than ``after`` and its claims,
        dropped ones too; returns the steps released."""

    @abstractmethod
    async def steps(self, run_id: str) -> list[Step]:
        """By number, without the released ones."""

    @abstractmethod
    async def claims(
        self, run_id: str, *, step: int | None = None, session_id: str | None = None
    ) -> list[Claim]: ...

    @abstractmethod
    async def recent_claims(self, run_id: str, epoch: int, groups: int) -> list[Claim]:
        """Those of the train channel's ``groups`` groups of highest index that have any in that epoch, in
        the order they were made."""

    @abstractmethod
    async def progress(self, run_id: str, channel: Channel = Channel.TRAIN) -> Progress: ...

    # keys and secrets
    @abstractmethod
    async def put_key(self, key: KeyRow) -> None:
        """Raises ConflictError when a key of this hash is there, or one of this name that is not revoked."""

    @abstractmethod
    async def key(self, key_hash: str) -> KeyRow | None:
        """Also one that was revoked."""

    @abstractmethod
    async def keys(self) -> list[KeyRow]:
        """Oldest first."""

    @abstractmethod
    async def revoke_key(self, prefix_or_name: str) -> int:
        """Revoke the keys with this name, or whose hash begins so (eight digits at least); returns how
        many were not revoked before."""

    @abstractmethod
    async def secret(self, name: str) -> bytes:
        """32 random bytes, made when they are first asked for and the same ever after."""

    # who acts for a run
    @abstractmethod
    async def take_lease(self, run_id: str, name: str) -> int:
        """The next lease of a role's name: whoever holds an earlier one writes nothing more."""

    @abstractmethod
    async def hold_lease(self, run_id: str, name: str, lease: int) -> None:
        """From now on this store writes under the lease: every write raises LeaseLost once a later one was
        taken, as this does."""

    # roles that are up
    @abstractmethod
    async def put_endpoint(self, endpoint: Endpoint) -> None: ...

    @abstractmethod
    async def endpoints(self, run_id: str) -> list[Endpoint]: ...

    @abstractmethod
    async def remove_endpoint(self, run_id: str, role: str, name: str) -> None: ...
