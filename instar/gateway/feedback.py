"""Record feedback on sessions and replies, and the rewards derived from it.

A corrected reply is recorded as text and, if possible, as the tokens that the model should have sampled.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from itertools import compress
from typing import Annotated, Literal

import msgspec

from instar.config import ModelRoute, RunConfig
from instar.errors import PromptTooLong, RenderError
from instar.gateway.auth import Action, Caller, authorize, check_reward, is_allowed
from instar.gateway.base import ApiError, bad_request, invalid_value
from instar.gateway.pipeline.record import MODEL_UNTRAINABLE_REASON
from instar.gateway.routing import match_model_route
from instar.record.base import Renderer
from instar.record.correction import encode_correction
from instar.record.redact import Redactor
from instar.store.base import Store, make_feedback_reward_id
from instar.types import (
    AGENT_FEEDBACK_PREFIX,
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

HUMAN_SCORER = "feedback"
AGENT_SCORER = "agent-feedback"
"""The scorer name for agents' feedback. Settings in `scoring.combine` for `feedback` do not apply to it."""
THUMBS = {"up": 1, "down": -1, 1: 1, -1: -1}
FEEDBACK_PAGE_SIZE = 100
THUMB_REWARDS = {1: 1.0, -1: 0.0}
UNUSED_LIVE_REASON = (
    "this run does not train on live replies of this agent; in a run with data 'live', set agents.NAME.mode "
    "to learn"
)

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
    trainable: bool = False
    """True if the run trains on the correction, in a later step if it is training, or else when it is trained
    again."""
    reason: str | None = None
    """Why the run does not train on the correction. In lists of feedback, the reasons why a correction has no
    tokens are not included."""


class FeedbackList(msgspec.Struct):
    feedback: list[FeedbackView]
    next: str | None = None
    """The value of `after` with which the next request continues, or None at the end of the list."""


def explain_unused_corrections(config: RunConfig) -> str | None:
    """Return why no step of the run trains on corrections, or None if its steps do."""
    if not config.trains:
        return "this run only serves the model; export its sessions and train another run on them"
    if config.trainer.corrections.weight == 0:
        return "trainer.corrections.weight is 0"
    return None


def compute_reward_value(feedback: Feedback) -> float | None:
    """Return the score, else 1 for thumbs up or 0 for thumbs down, else None."""
    if feedback.score is not None:
        return feedback.score
    return None if feedback.thumbs is None else THUMB_REWARDS[feedback.thumbs]


@dataclass(slots=True, eq=False)
class FeedbackService:
    store: Store
    redactor: Redactor
    _: KW_ONLY
    run_id: str
    renderer: Renderer | None
    """Encodes corrections; None if the run has no engine."""
    get_max_context: Callable[[], int | None]
    """Returns the model's context length in tokens, or None if it is unknown."""
    models: Mapping[str, ModelRoute]
    reward_range: tuple[float, float]
    unused_reason: str | None = None
    """Why the run does not train on any correction (see `explain_unused_corrections`), or None if it does.
    The tokens are stored in any case, because another run may train on them after an export."""
    trained_agents: Collection[str] | None = None
    """The agents whose live replies the run trains on, or None if it trains on those of all agents."""

    async def add(
        self, caller: Caller, body: FeedbackBody, client_key: str | None = None
    ) -> tuple[FeedbackView, bool]:
        """Record feedback. Return the recorded feedback, and True if it is new.

        If the body has no ``feedback_id``, the request's idempotency key (``client_key``) identifies the
        feedback within its session. Raise ApiError (409) if the id was used for different feedback.
        """
        _check_body(body)
        session, call = await self._find_subject(caller, body)
        check_reward(caller, body.score, self.reward_range, "score")
        feedback, reason = await self._build_feedback(session, call, body, client_key, caller)
        value = compute_reward_value(feedback)
        rewards = [] if value is None else [_build_reward(feedback, value, call, caller)]
        if await self.store.add_feedback(feedback, rewards):
            return await self._build_view(feedback, reason), True
        for recorded in await self.store.feedback(self.run_id, feedback_id=feedback.feedback_id):
            if _has_same_content(recorded, feedback, call):
                return await self._build_view(recorded, reason), False
        message = f"The id {feedback.feedback_id!r} is already used by different feedback; send another."
        raise ApiError(409, message, code="conflict", param="feedback_id")

    async def list_feedback(self, session_id: str | None, after: str | None = None) -> FeedbackList:
        """Return a page of the feedback on a session, or on all sessions of the run, oldest first."""
        rows = await self.store.feedback(
            self.run_id, session_id=session_id, after=after, limit=FEEDBACK_PAGE_SIZE + 1
        )
        views = [await self._build_view(row) for row in rows[:FEEDBACK_PAGE_SIZE]]
        return FeedbackList(views, views[-1].feedback_id if len(rows) > len(views) else None)

    async def _build_view(self, feedback: Feedback, reason: str | None = None) -> FeedbackView:
        view = msgspec.convert(feedback, FeedbackView, from_attributes=True)
        view.reward = compute_reward_value(feedback)
        if feedback.correction_ids is None:
            view.reason = reason
        else:
            view.reason = self.unused_reason or await self._explain_unused_live(feedback.session_id)
            view.trainable = view.reason is None
        return view

    async def _explain_unused_live(self, session_id: str) -> str | None:
        """Return why the run does not train on corrections of this session because it is live, or None."""
        if self.trained_agents is None:
            return None
        session = await self.store.session(session_id)
        if session is None or session.channel is not Channel.LIVE or session.agent_id in self.trained_agents:
            return None
        return UNUSED_LIVE_REASON

    async def _find_subject(self, caller: Caller, body: FeedbackBody) -> tuple[Session, Call | None]:
        call = await self._find_call(caller, body)
        session_id = call.session_id if call else body.session_id or caller.session_id
        if session_id is None:
            message = "Send a session_id, a call_id or a response_id."
            raise bad_request(message, "session_id", "missing_required_parameter")
        if body.session_id is not None and body.session_id != session_id:
            message = f"The call belongs to the session {session_id!r}, not to {body.session_id!r}"
            raise ApiError(403, f"{message}; leave 'session_id' out.", code="session_conflict")
        session = await self._find_session(session_id)
        if session is None:
            raise ApiError(404, f"This run has no session {session_id!r}.", code="session_not_found")
        authorize(caller, Action.GIVE_FEEDBACK, session)
        return session, call

    async def _find_session(self, session_id: str) -> Session | None:
        session = await self.store.session(session_id)
        return session if session is not None and session.run_id == self.run_id else None

    async def _find_call(self, caller: Caller, body: FeedbackBody) -> Call | None:
        if body.call_id is not None:
            param, call = "call_id", await self.store.call(body.call_id)
            calls = [] if call is None else [call]
        elif body.response_id is not None:
            param, calls = "response_id", await self.store.calls_by_request(body.response_id)
        else:
            return None
        # Calls that the caller may not use are treated as missing. Several responses may have the same id.
        sessions = [await self._find_session(call.session_id) for call in calls]
        is_usable = [session and is_allowed(caller, Action.GIVE_FEEDBACK, session) for session in sessions]
        calls = list(compress(calls, is_usable))
        if body.session_id is not None and len(calls) > 1:
            calls = [call for call in calls if call.session_id == body.session_id]
        if not calls:
            message = f"There is no reply {body.call_id or body.response_id!r} that this key may access."
            raise ApiError(404, message, code="reply_not_found", param=param)
        if len(calls) > 1:
            ids = ", ".join(call.call_id for call in calls)
            problem = f"{len(calls)} calls have the response_id {body.response_id!r}"
            raise bad_request(f"{problem}; send one of these call_ids instead: {ids}.", param)
        return calls[0]

    async def _build_feedback(
        self, session: Session, call: Call | None, body: FeedbackBody, client_key: str | None, caller: Caller
    ) -> tuple[Feedback, str | None]:
        """Return the feedback, and why the model cannot be trained on its correction. The reason is None if
        training is possible, or if there is no correction."""
        redact = self.redactor.redact_text
        session_id = session.session_id
        is_from_person = is_allowed(caller, Action.GIVE_HUMAN_FEEDBACK, session)
        feedback_id = body.feedback_id or client_key or new_id("fb")
        if not is_from_person:
            # An agent must not be able to take the id of a person's feedback before the person uses it.
            feedback_id = f"{AGENT_FEEDBACK_PREFIX}{session_id}/{feedback_id}"
        elif body.feedback_id is None and client_key is not None:
            feedback_id = f"{session_id}/{client_key}"
        if redact(feedback_id) != feedback_id:
            raise bad_request("The feedback id looks like a secret; send a different id.", "feedback_id")
        ids, reason, correction = None, None, None
        if body.correction is not None:
            correction = redact(body.correction)
            call = call or await self._find_last_call(session_id)
            if correction != body.correction:
                reason = "a secret was removed from the correction"
            elif not is_from_person:
                reason = f"corrections from {caller.kind} keys are not used for training; use a feedback key"
            else:
                # A long correction must not block the event loop.
                ids, reason = await asyncio.to_thread(self._encode_correction, session, call, correction)
        feedback = Feedback(
            feedback_id=feedback_id,
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

    async def _find_last_call(self, session_id: str) -> Call:
        for call in reversed(await self.store.calls(session_id)):
            if call.status is CallStatus.OK:
                return call
        message = "The session has no complete reply to correct; leave 'correction' out."
        raise invalid_value(message, "correction")

    def _encode_correction(self, session: Session, call: Call, text: str) -> tuple[Ids | None, str | None]:
        """Return the correction's tokens, or None and the reason why the model cannot be trained on it."""
        route = match_model_route(self.models, call.model)
        if session.channel is Channel.VAL:
            return None, "sessions on the val channel are not used for training"
        if route is not None and not route.trainable:
            return None, MODEL_UNTRAINABLE_REASON
        if not len(call.prompt_ids):
            return None, f"the call's tokens were not stored: {call.reason}"
        if self.renderer is None:
            return None, "the run has no engine, so the correction cannot be tokenized"
        try:
            self.renderer.max_prompt_tokens = max_context = self.get_max_context()
            ids = encode_correction(self.renderer, call, text)
        except (RenderError, PromptTooLong) as error:
            return None, str(error)
        length = len(call.prompt_ids) + len(ids)
        if max_context is not None and length > max_context:
            problem = f"the prompt and the correction have {length} tokens"
            return None, f"{problem}; the context holds {max_context}"
        return ids, None


def _check_body(body: FeedbackBody) -> None:
    if body.thumbs is None and body.score is None and not body.text and body.correction is None:
        raise invalid_value("Send at least one of thumbs, score, text, correction.")
    if body.score is not None and not math.isfinite(body.score):
        raise invalid_value(f"'score' is {body.score}; it must be a finite number.", "score")
    if body.call_id is not None and body.response_id is not None:
        raise invalid_value("Send a call_id or a response_id, not both.", "response_id")


def _build_reward(feedback: Feedback, value: float, call: Call | None, caller: Caller) -> Reward:
    detail = {"feedback_id": feedback.feedback_id, "by": caller.kind}
    if feedback.author:
        detail["author"] = feedback.author
    return Reward(
        session_id=feedback.session_id,
        value=value,
        source=feedback.source,
        scorer=HUMAN_SCORER if feedback.source is RewardSource.HUMAN else AGENT_SCORER,
        call_id=call.call_id if call else None,
        detail=detail,
        created_at=feedback.created_at,
        # The prefix of the reward id ensures that a client's id cannot replace a scorer's reward.
        reward_id=make_feedback_reward_id(feedback.feedback_id),
    )


def _has_same_content(recorded: Feedback, feedback: Feedback, call: Call | None) -> bool:
    """Return True if both have the same content. If the request names no call, its correction may have been
    recorded for an earlier call, because the session may have made more calls since then."""
    is_same_call = recorded.call_id == feedback.call_id or (call is None and feedback.correction is not None)
    return is_same_call and all(
        getattr(recorded, name) == getattr(feedback, name)
        for name in ("session_id", "thumbs", "score", "text", "correction", "author")
    )
