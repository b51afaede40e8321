"""Record feedback on sessions and replies, and the rewards derived from it.

A corrected reply is recorded as text and, if possible, as the tokens that the model should have sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from itertools import compress
from typing import Any

import msgspec
import numpy as np

from instar.config import ModelRoute
from instar.errors import PromptTooLong, RenderError
from instar.gateway.auth import Action, Caller, authorize, check_reward, is_allowed
from instar.gateway.base import ApiError, bad_request, invalid_value
from instar.gateway.feedback_api import (
    NO_REASONS,
    FeedbackBody,
    FeedbackList,
    FeedbackView,
    UnusedReasons,
    check_body,
)
from instar.gateway.pipeline.record import MODEL_UNTRAINABLE_REASON
from instar.gateway.routing import match_model_route
from instar.live.base import is_held_out
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
RATING_FIELDS = ("session_id", "thumbs", "score", "text", "correction", "author")
COMPARED_FIELDS = (*RATING_FIELDS, "preferred", "other_call_id", "other_text")
"""The content of feedback, which a retry repeats."""


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
    unused_reasons: UnusedReasons = NO_REASONS
    trained_agents: Collection[str] | None = None
    """The agents whose live replies the run trains on, or None if it trains on those of all agents."""

    async def add(
        self, caller: Caller, body: FeedbackBody, client_key: str | None = None
    ) -> tuple[FeedbackView, bool]:
        """Record feedback. Return the recorded feedback, and True if it is new.

        If the body has no ``feedback_id``, the request's idempotency key (``client_key``) identifies the
        feedback within its session. Raise ApiError (409) if the id was used for different feedback.
        """
        check_body(body)
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
        if feedback.correction_ids is None and feedback.other_ids is None:
            view.reason = reason
        else:
            unused = self.unused_reasons
            view.reason = unused.preferences if feedback.correction_ids is None else unused.corrections
            view.reason = view.reason or await self._explain_unused_live(feedback.session_id)
            if view.reason is None and feedback.other_call_id is not None:
                other = await self.store.call(feedback.other_call_id)
                view.reason = None if other is None else await self._explain_unused_live(other.session_id)
            view.trainable = view.reason is None
        return view

    async def _explain_unused_live(self, session_id: str) -> str | None:
        """Return why the run does not train on feedback on this session because it is live, or None."""
        if self.trained_agents is None:
            return None
        session = await self.store.session(session_id)
        if session is None or session.channel not in (Channel.LIVE, Channel.RESAMPLED):
            return None
        if session.agent_id not in self.trained_agents:
            return UNUSED_LIVE_REASON
        first = await self.store.first_call(session_id) if session.channel is Channel.LIVE else None
        return self.unused_reasons.held_out if first is not None and is_held_out(first.messages) else None

    async def _find_subject(self, caller: Caller, body: FeedbackBody) -> tuple[Session, Call | None]:
        call = await self._find_call(caller, body.call_id, body.response_id, body.session_id)
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

    async def _find_call(
        self,
        caller: Caller,
        call_id: str | None,
        response_id: str | None,
        session_id: str | None = None,
        prefix: str = "",
    ) -> Call | None:
        """Return the call with one of the two ids, or None if both are None. ``prefix`` is that of the names
        of the request fields that contain the ids."""
        if call_id is not None:
            param, call = f"{prefix}call_id", await self.store.call(call_id)
            calls = [] if call is None else [call]
        elif response_id is not None:
            param, calls = f"{prefix}response_id", await self.store.calls_by_request(response_id)
        else:
            return None
        # Calls that the caller may not use are treated as missing. Several responses may have the same id.
        sessions = [await self._find_session(call.session_id) for call in calls]
        is_usable = [session and is_allowed(caller, Action.GIVE_FEEDBACK, session) for session in sessions]
        calls = list(compress(calls, is_usable))
        if session_id is not None and len(calls) > 1:
            calls = [call for call in calls if call.session_id == session_id]
        if not calls:
            message = f"There is no reply {call_id or response_id!r} that this key may access."
            raise ApiError(404, message, code="reply_not_found", param=param)
        if len(calls) > 1:
            ids = ", ".join(call.call_id for call in calls)
            problem = f"{len(calls)} calls have the {param} {response_id!r}"
            raise bad_request(f"{problem}; send one of these as {prefix}call_id instead: {ids}.", param)
        return calls[0]

    async def _build_feedback(
        self, session: Session, call: Call | None, body: FeedbackBody, client_key: str | None, caller: Caller
    ) -> tuple[Feedback, str | None]:
        """Return the feedback, and why the model cannot be trained on its correction or preference. The
        reason is None if training is possible, or if there is neither."""
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
        fields: dict[str, Any] = {}
        reason = None
        if body.correction is not None or body.preferred is not None:
            call = call or await self._find_last_call(session_id)
        if body.correction is not None and call is not None:
            fields, reason = await self._build_correction(caller, session, call, body.correction)
        elif body.preferred is not None and call is not None:
            fields, reason = await self._build_preference(caller, session, call, body)
        feedback = Feedback(
            feedback_id=feedback_id,
            session_id=session_id,
            call_id=call.call_id if call else None,
            thumbs=None if body.thumbs is None else THUMBS[body.thumbs],
            score=body.score,
            text=redact(body.text),
            author=redact(body.author),
            created_at=time.time(),
            **fields,
        )
        return feedback, reason

    async def _build_correction(
        self, caller: Caller, session: Session, call: Call, text: str
    ) -> tuple[dict[str, Any], str | None]:
        """Return the fields of the feedback, and why the model cannot be trained on the correction."""
        correction = self.redactor.redact_text(text)
        ids = None
        if correction != text:
            reason = "a secret was removed from the correction"
        elif not is_allowed(caller, Action.GIVE_HUMAN_FEEDBACK, session):
            reason = f"corrections from {caller.kind} keys are not used for training; use a feedback key"
        else:
            # A long correction must not block the event loop.
            ids, reason = await asyncio.to_thread(self._encode_reply, session, call, correction)
        return {"correction": correction, "correction_ids": ids}, reason

    async def _build_preference(
        self, caller: Caller, session: Session, call: Call, body: FeedbackBody
    ) -> tuple[dict[str, Any], str | None]:
        """Return the fields of the feedback, and why the model cannot be trained on the preference."""
        authorize(caller, Action.GIVE_HUMAN_FEEDBACK, session, param="preferred")
        fields: dict[str, Any] = {"preferred": body.preferred}
        other = await self._find_call(caller, body.other_call_id, body.other_response_id, prefix="other_")
        if other is not None:
            reason = self._explain_untrainable(session, call) or _explain_incomparable(call, other)
            ids = other.sampled_ids if reason is None else None
            return {**fields, "other_call_id": other.call_id, "other_ids": ids}, reason
        assert body.other_text is not None, "checked in `check_body`"
        text, ids = self.redactor.redact_text(body.other_text), None
        if text != body.other_text:
            reason = "a secret was removed from the other reply"
        elif not len(call.sampled_ids):
            reason = "the call's reply has no tokens"
        else:
            ids, reason = await asyncio.to_thread(self._encode_reply, session, call, text)
        return {**fields, "other_text": text, "other_ids": ids}, reason

    async def _find_last_call(self, session_id: str) -> Call:
        for call in reversed(await self.store.calls(session_id)):
            if call.status is CallStatus.OK:
                return call
        message = "The session has no complete reply; leave 'correction' and 'preferred' out."
        raise invalid_value(message, "session_id")

    def _explain_untrainable(self, session: Session, call: Call) -> str | None:
        """Return why the model cannot be trained on any reply to the call's prompt, or None if it can."""
        route = match_model_route(self.models, call.model)
        if session.channel is Channel.VAL:
            return "sessions on the val channel are not used for training"
        if route is not None and not route.trainable:
            return MODEL_UNTRAINABLE_REASON
        return None if len(call.prompt_ids) else f"the call's tokens were not stored: {call.reason}"

    def _encode_reply(self, session: Session, call: Call, text: str) -> tuple[Ids | None, str | None]:
        """Return the tokens of a text as a reply to the call's prompt, or None and the reason why the model
        cannot be trained on them."""
        if (reason := self._explain_untrainable(session, call)) is not None:
            return None, reason
        if self.renderer is None:
            return None, "the run has no engine, so the text cannot be tokenized"
        try:
            self.renderer.max_prompt_tokens = max_context = self.get_max_context()
            ids = encode_correction(self.renderer, call, text)
        except (RenderError, PromptTooLong) as error:
            return None, str(error)
        length = len(call.prompt_ids) + len(ids)
        if max_context is not None and length > max_context:
            problem = f"the prompt and the text have {length} tokens"
            return None, f"{problem}; the context holds {max_context}"
        return ids, None


def _explain_incomparable(call: Call, other: Call) -> str | None:
    """Return why the model cannot be trained on a preference between the two calls, or None if it can. Raise
    ApiError (400) if they cannot be compared at all."""
    if call.call_id == other.call_id:
        raise invalid_value("A reply cannot be compared with itself; name another one.", "other_call_id")
    if call.agent_id != other.agent_id:
        message = "The two replies belong to different agents; compare two replies of one agent."
        raise invalid_value(message, "other_call_id")
    if not np.array_equal(call.prompt_ids, other.prompt_ids):
        return "the two replies have different prompts"
    if call.status is not CallStatus.OK or other.status is not CallStatus.OK:
        return "one of the replies is not complete"
    return None if len(call.sampled_ids) and len(other.sampled_ids) else "one of the replies has no tokens"


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
        getattr(recorded, name) == getattr(feedback, name) for name in COMPARED_FIELDS
    )
