"""The gateway's control API, as it goes over the wire, and the error that every route answers with.

    POST /sessions                  OpenSession      → OpenedSession     admin key
    POST /sessions/{id}/complete    CompleteSession  → EndedSession      admin key, or the session's own
    POST /sessions/{id}/fail        FailSession      → EndedSession      admin key, or the session's own
    GET  /sessions/{id}                              → SessionView       admin key, or the session's own
    POST /feedback                  GiveFeedback     → FeedbackView      admin key, or the session's own
    GET  /feedback?session={id}                      → FeedbackList      admin key

Keys go in ``Authorization: Bearer``. Ending a session that has ended changes nothing and says so.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from instar.types import Channel, Json, Reward, RewardSource, ScoreState, SessionStatus

SESSION_HEADER = "x-instar-session"
SAMPLING_KEYS = frozenset({"temperature", "top_p", "top_k", "max_tokens"})
"""Settings that a session may force on its calls."""


Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""What a store's whole numbers hold."""


class OpenSession(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    channel: Channel = Channel.LIVE
    task_id: str | None = None
    task: Json | None = None
    """The task itself; kept in the session's metadata under ``task``."""
    group_id: str | None = None
    slot: Int64 = 0
    attempt: Int64 = 0
    seed: Int64 | None = None
    """Makes the calls' own seeds, where the agent gives none."""
    sampling: Json = msgspec.field(default_factory=dict)
    """Settings forced on every call: ``temperature``, ``top_p``, ``top_k``, ``max_tokens``."""
    metadata: Json = msgspec.field(default_factory=dict)


class OpenedSession(msgspec.Struct):
    session_id: str
    base_url: str
    """What an OpenAI client takes as ``base_url``."""
    api_key: str
    """Shown this once; only its hash is kept."""


class RewardBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    value: float
    source: RewardSource = RewardSource.AGENT
    scorer: str = ""
    call_id: str | None = None
    detail: Json = msgspec.field(default_factory=dict)
    scorer_version: str = ""
    cost: float = 0.0
    reward_id: str | None = None


def to_reward_body(reward: Reward) -> RewardBody:
    """A reward as it is sent, without its session and its time."""
    return RewardBody(
        reward.value,
        reward.source,
        reward.scorer,
        reward.call_id,
        reward.detail,
        reward.scorer_version,
        reward.cost,
        reward.reward_id,
    )


class ScoreBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    scorer: str
    state: ScoreState
    attempts: int = 1
    reason: str | None = None


class CompleteSession(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    reward: float | None = None
    """What the agent gives itself."""
    metadata: Json = msgspec.field(default_factory=dict)
    rewards: list[RewardBody] = msgspec.field(default_factory=list[RewardBody])
    """From other sources; admin key only."""
    scores: list[ScoreBody] = msgspec.field(default_factory=list[ScoreBody])
    """Which scorers are done with it; admin key only."""


class FailSession(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    reason: str
    reward: float | None = None
    metadata: Json = msgspec.field(default_factory=dict)
    rewards: list[RewardBody] = msgspec.field(default_factory=list[RewardBody])


class EndedSession(msgspec.Struct):
    session_id: str
    status: SessionStatus
    changed: bool
    """False: it had ended before, and stays as it was."""


class CallView(msgspec.Struct):
    call_id: str
    parent_id: str | None
    link: str
    status: str
    trainable: bool
    reason: str | None
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int
    reply: Json


class SessionView(msgspec.Struct):
    session_id: str
    run_id: str
    agent_id: str
    policy_id: str
    channel: Channel
    status: SessionStatus
    group_id: str | None
    slot: int
    attempt: int
    task_id: str | None
    reason: str | None
    metadata: Json
    created_at: float
    ended_at: float | None
    calls: list[CallView]
    rewards: list[RewardBody]


class ApiError(Exception):
    """An answer that is not a success. ``param`` is the path of the fault in the request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, code=code, param=param)


def from_validation(error: msgspec.ValidationError | msgspec.DecodeError) -> ApiError:
    """msgspec says where: «Expected `str`, got `int` - at `$.messages[0].role`»."""
    message, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    _, unknown, field = message.partition("unknown field `")
    if unknown:
        name = field.rstrip("`")
        path = f"{path}.{name}" if path else name
        return bad_request(f"Unknown parameter: '{path}'.", path, "unknown_parameter")
    _, missing, field = message.partition("missing required field `")
    if missing:
        name = field.rstrip("`")
        path = f"{path}.{name}" if path else name
        return bad_request(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
    if not isinstance(error, msgspec.ValidationError):
        return bad_request(f"The body is not valid JSON: {message}", code="invalid_json")
    where = f" at '{path}'" if path else ""
    return bad_request(f"Invalid request{where}: {message}", path or None, "invalid_type")
