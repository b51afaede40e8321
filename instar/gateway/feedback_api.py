"""The requests and responses of the feedback routes."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

import msgspec

from instar.config import RunConfig
from instar.gateway.base import invalid_value
from instar.types import AGENT_FEEDBACK_PREFIX, RewardSource

FeedbackId = Annotated[str, msgspec.Meta(pattern=f"^(?!{AGENT_FEEDBACK_PREFIX})[!-~]{{1,200}}$")]
FeedbackText = Annotated[str, msgspec.Meta(max_length=100_000)]


class FeedbackBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Feedback on a session, a call or a response. With a session's key, no id is needed."""

    session_id: str | None = None
    call_id: str | None = None
    response_id: str | None = None
    feedback_id: FeedbackId | None = None
    """The client's id for the feedback. A retry with the same id is not recorded again."""
    thumbs: Literal["up", "down", 1, -1] | None = None
    score: float | None = None
    text: FeedbackText = ""
    correction: Annotated[str, msgspec.Meta(min_length=1, max_length=100_000)] | None = None
    """The corrected reply of the call or, if no call is named, of the session's last complete call."""
    author: Annotated[str, msgspec.Meta(max_length=200)] = ""
    preferred: Literal["this", "other"] | None = None
    """Which of two replies to the same prompt is better: the call's (by default, the session's last complete
    call's), or the other one, which is named by one of the next three fields."""
    other_call_id: str | None = None
    other_response_id: str | None = None
    other_text: Annotated[str, msgspec.Meta(min_length=1, max_length=100_000)] | None = None


class FeedbackView(msgspec.Struct):
    feedback_id: str
    session_id: str
    call_id: str | None
    thumbs: int | None
    score: float | None
    text: str
    correction: str | None
    author: str
    created_at: float
    source: RewardSource
    reward: float | None = None
    preferred: str | None = None
    other_call_id: str | None = None
    other_text: str | None = None
    trainable: bool = False
    """True if the run trains on the correction or preference, in a later step if it is training, or else when
    it is trained again."""
    reason: str | None = None
    """Why the run does not train on the correction or preference. In lists of feedback, the reasons why one
    has no tokens are not included."""


class FeedbackList(msgspec.Struct):
    feedback: list[FeedbackView]
    next: str | None = None
    """The value of `after` with which the next request continues, or None at the end of the list."""


HELD_OUT_REASON = "the session is held out, to evaluate new versions"


class UnusedReasons(NamedTuple):
    """Why the run does not train on any correction or preference, or None if it does. The tokens are stored
    in any case, because another run may train on them after an export."""

    corrections: str | None = None
    preferences: str | None = None
    held_out: str | None = None
    """Why it does not train on those of sessions that are held out."""


NO_REASONS = UnusedReasons()


def explain_unused(config: RunConfig) -> UnusedReasons:
    if not config.trains:
        reason = "this run only serves the model; export its sessions and train another run on them"
        return UnusedReasons(reason, reason)
    return UnusedReasons(
        "trainer.corrections.weight is 0" if config.trainer.corrections.weight == 0 else None,
        "trainer.preferences.weight is 0" if config.trainer.preferences.weight == 0 else None,
        HELD_OUT_REASON if config.has_gate else None,
    )


def check_body(body: FeedbackBody) -> None:
    """Raise ApiError (400) if the body is empty or contradicts itself."""
    if not body.text and all(v is None for v in (body.thumbs, body.score, body.correction, body.preferred)):
        raise invalid_value("Send at least one of thumbs, score, text, correction, preferred.")
    if body.score is not None and not math.isfinite(body.score):
        raise invalid_value(f"'score' is {body.score}; it must be a finite number.", "score")
    if body.call_id is not None and body.response_id is not None:
        raise invalid_value("Send a call_id or a response_id, not both.", "response_id")
    others = (body.other_call_id, body.other_response_id, body.other_text)
    count = sum(value is not None for value in others)
    if count != (0 if body.preferred is None else 1):
        names = "other_call_id, other_response_id, other_text"
        message = f"Send 'preferred' together with exactly one of {names}; got {count} of them."
        raise invalid_value(message, "preferred")
    if body.preferred is not None and body.correction is not None:
        message = "Send a correction or a preference, not both; send the second one as feedback of its own."
        raise invalid_value(message, "correction")
