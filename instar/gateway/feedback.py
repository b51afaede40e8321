"""Feedback from people on sessions and replies.

Feedback is recorded once, together with its reward. A corrected reply is recorded as the tokens that the
model should have sampled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from instar.config import ModelRoute
from instar.errors import RenderError
from instar.gateway.auth import Caller
from instar.gateway.base import ApiError, bad_request
from instar.gateway.routing import match_model_route
from instar.record.base import Renderer
from instar.record.correction import encode_correction
from instar.record.redact import Redactor
from instar.store.base import Store, feedback_key
from instar.types import (
    Call,
    CallStatus,
    Channel,
    Feedback,
    Ids,
    Reward,
    RewardSource,
    Session,
    new_id,
)

SCORER = "feedback"
THUMBS = {"up": 1, "down": -1, 1: 1, -1: -1}
THUMB_REWARDS = {1: 1.0, -1: 0.0}

FeedbackId = Annotated[str, msgspec.Meta(pattern="^[!-~]{1,200}$")]
FeedbackText = Annotated[str, msgspec.Meta(max_length=100_000)]


class FeedbackBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Feedback on a session, on a call, or on a response given by its id. With a session's own key, none of
    the three has to be given."""

    session_id: str | None = None
    call_id: str | None = None
    response_id: str | None = None
    feedback_id: FeedbackId | None = None
    """An id with which the same feedback can be sent again without being recorded twice."""
    thumbs: Literal["up", "down", 1, -1] | None = None
    score: float | None = None
    text: FeedbackText = ""
    correction: Annotated[str, msgspec.Meta(min_length=1, max_length=100_000)] | None = None
    """The reply that the call, or the last call of the session, should have given."""
    author: Annotated[str, msgspec.Meta(max_length=200)] = ""


class FeedbackView(msgspec.Struct):
    """Feedback as it was recorded."""

    feedback_id: str
    session_id: str
    call_id: str | None
    thumbs: int | None
    score: float | None
    text: str
    correction: str | None
    author: str
    created_at: float
    reward: float | None = None
    """The reward of the session or call that follows from the feedback."""
    trainable: bool = False
    """True if the correction can be trained on."""
    reason: str | None = None
    """Why the correction cannot be trained on."""


class FeedbackList(msgspec.Struct):
    feedback: list[FeedbackView]


def _feedback_view(feedback: Feedback, reason: str | None = None) -> FeedbackView:
    view = msgspec.convert(feedback, FeedbackView, from_attributes=True)
    view.reward, view.trainable, view.reason = (
        reward_value(feedback),
        feedback.correction_ids is not None,
        reason,
    )
    return view


def reward_value(feedback: Feedback) -> float | None:
    """Return the feedback's score, or else 1 or 0 for its thumb; None if the feedback is only text."""
    if feedback.score is not None:
        return feedback.score
    return None if feedback.thumbs is None else THUMB_REWARDS[feedback.thumbs]


@dataclass(frozen=True, slots=True)
class _FeedbackSubject:
    session: Session
    call: Call | None


class FeedbackService:
    def __init__(
        self,
        store: Store,
        redactor: Redactor,
        *,
        run_id: str,
        renderer: Renderer | None,
        max_context: Callable[[], int | None],
        models: Mapping[str, ModelRoute],
    ) -> None:
        """``renderer`` encodes corrections; ``max_context`` returns the length of the model's context."""
        self._store = store
        self._redactor = redactor
        self._run_id = run_id
        self._renderer = renderer
        self._max_context = max_context
        self._models = models

    async def add(
        self, caller: Caller, body: FeedbackBody, client_key: str | None = None
    ) -> tuple[FeedbackView, bool]:
        """Record feedback; return it, and True if it is new.

        ``client_key`` is an idempotency key, used as an id within the session. Raise ApiError (409) if the id
        belongs to different feedback.
        """
        _check_body(body)
        subject = await self._find_subject(caller, body)
        feedback, reason = await self._build_feedback(subject, body, client_key, caller)
        value = reward_value(feedback)
        rewards = [] if value is None else [_build_reward(feedback, value, subject, caller)]
        if await self._store.add_feedback(feedback, rewards):
            return _feedback_view(feedback, reason), True
        rows = await self._store.feedback(self._run_id, session_id=feedback.session_id)
        recorded = next((row for row in rows if row.feedback_id == feedback.feedback_id), None)
        if recorded is None or not _is_same(recorded, feedback, subject.call):
            raise ApiError(
                409,
                f"The feedback id {feedback.feedback_id!r} is already used by different feedback.",
                code="conflict",
                param="feedback_id",
            )
        return _feedback_view(recorded, reason), False

    async def list_feedback(self, session_id: str | None) -> list[FeedbackView]:
        """Return the feedback on a session, or on all sessions of the run, oldest first."""
        rows = await self._store.feedback(self._run_id, session_id=session_id)
        return [_feedback_view(row) for row in rows]

    async def _find_subject(self, caller: Caller, body: FeedbackBody) -> _FeedbackSubject:
        call = await self._find_call(caller, body)
        session_id = call.session_id if call else body.session_id or caller.session_id
        if session_id is None:
            raise bad_request(
                "Send a session_id, a call_id or a response_id.", "session_id", "missing_required_parameter"
            )
        if body.session_id is not None and body.session_id != session_id:
            raise ApiError(403, "The call belongs to another session.", code="session_conflict")
        session = await self._get_session(session_id)
        if session is None:
            raise ApiError(404, f"There is no session {session_id!r}.", code="session_not_found")
        caller.check_access(session)
        return _FeedbackSubject(session, call)

    async def _get_session(self, session_id: str) -> Session | None:
        session = await self._store.session(session_id)
        return session if session is not None and session.run_id == self._run_id else None

    async def _find_call(self, caller: Caller, body: FeedbackBody) -> Call | None:
        if body.call_id is not None:
            param, call = "call_id", await self._store.call(body.call_id)
            calls = [] if call is None else [call]
        elif body.response_id is not None:
            param, calls = "response_id", await self._store.calls_by_request(body.response_id)
        else:
            return None
        # Calls that the caller may not use are treated as missing. Some providers give many responses the
        # same id.
        calls = [call for call in calls if await self._has_access(caller, call)]
        if body.session_id is not None and len(calls) > 1:
            calls = [call for call in calls if call.session_id == body.session_id]
        if not calls:
            name = body.call_id or body.response_id
            raise ApiError(404, f"There is no reply {name!r}.", code="reply_not_found", param=param)
        if len(calls) > 1:
            ids = ", ".join(call.call_id for call in calls)
            raise bad_request(f"Several calls have this id; send the call_id of one of {ids}.", param)
        return calls[0]

    async def _has_access(self, caller: Caller, call: Call) -> bool:
        session = await self._get_session(call.session_id)
        if session is None:
            return False
        try:
            caller.check_access(session)
        except ApiError:
            return False
        return True

    async def _build_feedback(
        self, subject: _FeedbackSubject, body: FeedbackBody, client_key: str | None, caller: Caller
    ) -> tuple[Feedback, str | None]:
        """Return the feedback, and the reason if its correction cannot be trained on, else None."""
        redact = self._redactor.redact_text
        session_id = subject.session.session_id
        call, ids, reason, correction = subject.call, None, None, None
        if body.correction is not None:
            correction = redact(body.correction)
            call = call or await self._last_call(session_id)
            if correction != body.correction:
                reason = "a secret was removed from the correction"
            elif _is_from_agent(subject.session, caller):
                reason = "it was sent with the session key of a rollout, which only the agent has"
            else:
                ids, reason = self._encode_correction(subject.session, call, correction)
        feedback = Feedback(
            feedback_id=self._choose_id(session_id, body.feedback_id, client_key),
            session_id=session_id,
            call_id=call.call_id if call else None,
            thumbs=None if body.thumbs is None else THUMBS[body.thumbs],
            score=body.score,
            text=redact(body.text),
            correction=correction,
            correction_ids=ids,
            author=redact(body.author),
            created_at=time.time(),
        )
        return feedback, reason

    def _choose_id(self, session_id: str, feedback_id: str | None, client_key: str | None) -> str:
        chosen = feedback_id or (f"{session_id}/{client_key}" if client_key else new_id("fb"))
        if self._redactor.redact_text(chosen) != chosen:
            message = "The feedback id looks like a secret and would be stored; choose another one."
            raise bad_request(message, "feedback_id")
        return chosen

    async def _last_call(self, session_id: str) -> Call:
        calls = await self._store.calls(session_id)
        complete = [call for call in calls if call.status is CallStatus.OK]
        if not complete:
            raise bad_request("This session has no reply to correct.", "correction", "invalid_value")
        return complete[-1]

    def _encode_correction(self, session: Session, call: Call, text: str) -> tuple[Ids | None, str | None]:
        """Return the tokens of the correction and None, or None and the reason if the correction cannot be
        trained on."""
        route = match_model_route(self._models, call.model)
        if session.channel is Channel.VAL:
            return None, "sessions of the val channel are not trained on"
        if route is not None and not route.trainable:
            return None, "training on this model is disabled by its route (trainable: false)"
        if not len(call.prompt_ids):
            return None, f"the call's tokens were not stored: {call.reason}"
        if self._renderer is None:
            return None, "the model's tokenizer is not available"
        try:
            ids = encode_correction(self._renderer, call, text)
        except RenderError as error:
            return None, str(error)
        length, max_context = len(call.prompt_ids) + len(ids), self._max_context()
        if max_context is not None and length > max_context:
            return None, f"it has {length} tokens with its prompt; the context is {max_context} tokens"
        return ids, None


def _check_body(body: FeedbackBody) -> None:
    if body.thumbs is None and body.score is None and not body.text and body.correction is None:
        raise bad_request("Send at least one of thumbs, score, text, correction.", code="invalid_value")
    if body.score is not None and not math.isfinite(body.score):
        raise bad_request("A score must be a finite number.", "score", "invalid_value")
    if body.call_id is not None and body.response_id is not None:
        raise bad_request("Send a call_id or a response_id, not both.", "response_id", "invalid_value")


def _is_from_agent(session: Session, caller: Caller) -> bool:
    """Return True if the feedback was sent by an agent and not by a person. Only the agent has the key of a
    rollout's session, and an agent must not rate or teach itself."""
    return caller.kind == "session" and session.channel is not Channel.LIVE


def _build_reward(feedback: Feedback, value: float, subject: _FeedbackSubject, caller: Caller) -> Reward:
    detail = {"feedback_id": feedback.feedback_id, "by": caller.kind}
    is_from_agent = _is_from_agent(subject.session, caller)
    return Reward(
        session_id=feedback.session_id,
        value=value,
        source=RewardSource.AGENT if is_from_agent else RewardSource.HUMAN,
        scorer=SCORER,
        call_id=subject.call.call_id if subject.call else None,
        detail=detail | ({"author": feedback.author} if feedback.author else {}),
        created_at=feedback.created_at,
        # The key has a prefix, so that an id chosen by a client cannot replace a scorer's reward.
        reward_id=feedback_key(feedback.feedback_id),
    )


def _is_same(recorded: Feedback, feedback: Feedback, call: Call | None) -> bool:
    """Return True if both feedbacks have the same content. A correction of the session's last reply stays the
    same after other replies follow."""
    is_same_call = recorded.call_id == feedback.call_id or (call is None and feedback.correction is not None)
    return is_same_call and all(
        getattr(recorded, name) == getattr(feedback, name)
        for name in ("session_id", "thumbs", "score", "text", "correction", "author")
    )
