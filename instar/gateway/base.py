"""Wire types of the model, health, statistics and session routes, and the error type of all routes.

``ControlApi.build_routes`` assigns the types to routes, and ``GET /openapi.json`` describes all of them.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

import msgspec

from instar.types import Channel, GroupStatus, Json, Reward, RewardSource, ScoreState, SessionStatus

SESSION_HEADER = "x-instar-session"
IGNORED_FIELDS_HEADER = "x-instar-ignored-fields"
"""The response header that lists the fields of the request that the reply does not honour."""
DROPPED_MESSAGES_HEADER = "x-instar-dropped-messages"
MAX_SUBMITTED_CALLS = 256
"""The maximum number of calls in one submission."""
SAMPLING_KEYS = frozenset({"temperature", "top_p", "top_k", "max_tokens"})
"""The sampling settings that a session may override for all its calls."""

MAX_GROUP_SIZE = 1024

Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""An integer that the store can hold."""


class HealthView(msgspec.Struct, omit_defaults=True):
    status: str
    engine: Literal["none", "down", "up"]
    reason: str | None = None
    """Why the engine is down; None if it is not."""
    version: int | None = None
    """The policy version that the engine samples with; None if the engine is not up."""


class StatsView(msgspec.Struct):
    loop_lag_p99_ms: float
    rss_mb: float
    """The resident memory of the gateway's process, in MiB."""
    in_flight: int
    """The number of model calls and token count requests in progress."""
    sessions_in_memory: int


class ModelView(msgspec.Struct):
    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "instar"


class ModelList(msgspec.Struct):
    data: list[ModelView]
    object: str = "list"


class TokenCount(msgspec.Struct):
    input_tokens: int


class OpenSession(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    channel: Channel = Channel.LIVE
    task_id: str | None = None
    task: Json | None = None
    """The task's content, which is stored in the session's metadata under ``task``."""
    group_id: str | None = None
    slot: Int64 = 0
    attempt: Int64 = 0
    seed: Int64 | None = None
    """The engine samples each call with a seed derived from this one. On channels other than `train`, a
    seed in the request takes precedence."""
    sampling: Json = msgspec.field(default_factory=dict)
    """Sampling settings that override the agent's. The keys must be in `SAMPLING_KEYS`."""
    metadata: Json = msgspec.field(default_factory=dict)


class OpenedSession(msgspec.Struct):
    session_id: str
    base_url: str
    """The ``base_url`` for an OpenAI client."""
    api_key: str
    """The session's key. It cannot be retrieved later."""


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
    """Return the reward without its session and time."""
    return msgspec.convert(reward, RewardBody, from_attributes=True)


class ScoreBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    scorer: str
    state: ScoreState
    attempts: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 1
    reason: str | None = None


class CompleteSession(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    reward: float | None = None
    """The reward that the agent gives itself, if any."""
    metadata: Json = msgspec.field(default_factory=dict)
    rewards: list[RewardBody] = msgspec.field(default_factory=list[RewardBody])
    """Rewards from other sources; accepted only with the admin key."""
    scores: list[ScoreBody] = msgspec.field(default_factory=list[ScoreBody])
    """The scorers' final states; accepted only with the admin key."""
    reason: str | None = None
    """Why the session ended, if someone other than the agent ended it."""


class FailSession(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    reason: str
    reward: float | None = None
    metadata: Json = msgspec.field(default_factory=dict)
    rewards: list[RewardBody] = msgspec.field(default_factory=list[RewardBody])


class EndedSession(msgspec.Struct):
    session_id: str
    status: SessionStatus
    changed: bool
    """False if the session had already ended and was left unchanged."""


class OpenGroup(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    task: Json
    """The problem that all sessions of the group attempt. Rules and judges receive it."""
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_GROUP_SIZE)]
    """The number of slots, and so of sessions that are compared with each other."""
    task_id: str | None = None
    """The task's id in reports. By default, it is derived from the task, so equal tasks have equal ids."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """The seconds in which each session must be completed after it was opened. Default: `groups.deadline`."""


class SlotView(msgspec.Struct):
    """A slot of a group with its latest session."""

    slot: int
    session_id: str
    attempt: int
    """How many earlier sessions of the slot failed or were abandoned."""
    status: SessionStatus
    expires_at: float
    """The Unix time at which the session fails if it is still open."""
    session_url: str
    """The session's URL: `POST` to its `/complete` or `/fail` ends the session."""
    base_url: str
    """The ``base_url`` for an OpenAI client."""
    base_urls: dict[str, str]
    """The ``base_url`` for clients of each dialect. Only Anthropic's is without `/v1`."""
    api_key: str | None
    """The session's key, or None if the session has ended."""
    reason: str | None = None
    """Why the session failed or was abandoned."""
    reward: float | None = None
    """The latest reward of the session."""


class GroupView(msgspec.Struct):
    group_id: str
    index: int
    """The position of the group in the run."""
    status: GroupStatus
    size: int
    task_id: str
    task: Json
    deadline_s: float
    created_at: float
    slots: list[SlotView]
    reason: str | None = None
    """Why the group was dropped."""


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
    calls: list[CallView] = msgspec.field(default_factory=list[CallView])
    rewards: list[RewardBody] = msgspec.field(default_factory=list[RewardBody])


@dataclass(eq=False)
class ApiError(Exception):
    """A failed request, with the fields of its error response."""

    status: int
    message: str
    _: KW_ONLY
    code: str | None = None
    param: str | None = None
    """The path of the invalid value in the request, for example ``messages[0].role``."""
    retry_after: int | None = None
    """The seconds to wait before a retry, for the ``Retry-After`` header."""

    def __str__(self) -> str:
        return self.message


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, code=code, param=param)


def invalid_value(message: str, param: str | None = None) -> ApiError:
    return bad_request(message, param, "invalid_value")


def format_range(low: float, high: float) -> str:
    return f"at least {low}" if high == math.inf else f"between {low} and {high}"


def convert_validation_error(error: msgspec.ValidationError | msgspec.DecodeError) -> ApiError:
    """Return the ApiError for an error such as ``Expected `str`, got `int` - at `$.messages[0].role```."""
    message, _, path = str(error).partition(" - at `")
    path = path.rpartition("$")[2].rstrip("`").lstrip(".")  # the error of a key is at `key` in `$.path`
    for marker, label, code in (
        ("unknown field `", "Unknown parameter", "unknown_parameter"),
        ("missing required field `", "Missing required parameter", "missing_required_parameter"),
    ):
        _, separator, field = message.partition(marker)
        if separator:
            name = field.rstrip("`")
            path = f"{path}.{name}" if path else name
            return bad_request(f"{label}: '{path}'.", path, code)
    if not isinstance(error, msgspec.ValidationError):
        return bad_request(f"The body is not valid JSON: {message}", code="invalid_json")
    location = f" at '{path}'" if path else ""
    return bad_request(f"Invalid request{location}: {message}", path or None, "invalid_type")
