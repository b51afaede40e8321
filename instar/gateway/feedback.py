"""What people say of sessions and answers: recorded once, with the reward that follows from it, and a
corrected answer as the tokens that the model should have sampled."""

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
from instar.store.base import Store, correction_key
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
Text = Annotated[str, msgspec.Meta(max_length=100_000)]


class FeedbackBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """On one of: a session, a call, an answer by the id that it came with. With a session's own key, the
    session where none is named."""

    session_id: str | None = None
    call_id: str | None = None
    response_id: str | None = None
    feedback_id: FeedbackId | None = None
    """The same one again is the same feedback again."""
    thumbs: Literal["up", "down", 1, -1] | None = None
    score: float | None = None
    text: Text = ""
    correction: Annotated[str, msgspec.Meta(min_length=1, max_length=100_000)] | None = None
    """What should have been answered: by the call, or by the last call of the session."""
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
    reward: float | None
    """What follows for the session, or the call."""
    lesson: bool
    """Whether the correction can be trained on."""
    reason: str | None = None
    """Why it cannot; told to who gives it."""


class FeedbackList(msgspec.Struct):
    feedback: list[FeedbackView]


def feedback_view(feedback: Feedback, reason: str | None = None) -> FeedbackView:
    return FeedbackView(
        feedback_id=feedback.feedback_id,
        session_id=feedback.session_id,
        call_id=feedback.call_id,
        thumbs=feedback.thumbs,
        score=feedback.score,
        text=feedback.text,
        correction=feedback.correction,
        author=feedback.author,
        created_at=feedback.created_at,
        reward=reward_value(feedback),
        lesson=feedback.correction_ids is not None,
        reason=reason,
    )


def reward_value(feedback: Feedback) -> float | None:
    """A score is its own; a thumb up is 1, a thumb down 0; words alone are none."""
    if feedback.score is not None:
        return feedback.score
    return None if feedback.thumbs is None else THUMB_REWARDS[feedback.thumbs]


@dataclass(frozen=True, slots=True)
class Subject:
    """What feedback is about."""

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
        context: Callable[[], int | None],
        models: Mapping[str, ModelRoute],
    ) -> None:
        """``renderer``: writes corrections as tokens. ``context``: how many the model takes."""
        self._store = store
        self._redactor = redactor
        self._run_id = run_id
        self._renderer = renderer
        self._context = context
        self._models = models

    async def add(
        self, caller: Caller, asked: FeedbackBody, client_key: str | None = None
    ) -> tuple[FeedbackView, bool]:
        """What is recorded, and whether it is new. ``client_key``: an idempotency key, which stands for an id
        within its session. Raises ApiError 409 where the id stands for other feedback."""
        self._check(asked)
        subject = await self._subject(caller, asked)
        feedback, why = await self._feedback(subject, asked, client_key, caller)
        value = reward_value(feedback)
        rewards: list[Reward] = []
        if value is not None:
            rewards.append(_reward(feedback, value, subject, caller))
        if await self._store.add_feedback(feedback, rewards):
            return feedback_view(feedback, why), True
        known = await self._store.feedback(self._run_id, session_id=feedback.session_id)
        there = next((one for one in known if one.feedback_id == feedback.feedback_id), None)
        if there is None or not _same(there, feedback, subject.call):
            raise ApiError(
                409,
                f"Feedback {feedback.feedback_id!r} is there already, and says something else.",
                code="conflict",
                param="feedback_id",
            )
        return feedback_view(there, why), False

    async def list_feedback(self, session_id: str | None) -> list[FeedbackView]:
        """Oldest first."""
        return [feedback_view(one) for one in await self._store.feedback(self._run_id, session_id=session_id)]

    def _check(self, asked: FeedbackBody) -> None:
        if asked.thumbs is None and asked.score is None and not asked.text and asked.correction is None:
            raise bad_request("Give at least one of thumbs, score, text, correction.", code="invalid_value")
        if asked.score is not None and not math.isfinite(asked.score):
            raise bad_request("A score must be a finite number.", "score", "invalid_value")
        if asked.call_id is not None and asked.response_id is not None:
            raise bad_request("Give a call_id or a response_id.", "response_id", "invalid_value")

    # --- what it is about -------------------------------------------------------------------------

    async def _subject(self, caller: Caller, asked: FeedbackBody) -> Subject:
        call = await self._named_call(caller, asked)
        own = caller.session_id if call is None and asked.session_id is None else None
        session_id = call.session_id if call else asked.session_id or own
        if session_id is None:
            raise bad_request(
                "Give a session_id, a call_id or a response_id.", "session_id", "missing_required_parameter"
            )
        if asked.session_id is not None and asked.session_id != session_id:
            raise ApiError(403, "The call is of another session.", code="session_conflict")
        session = await self._session(session_id)
        if session is None:
            raise ApiError(404, f"There is no session {session_id!r}.", code="session_not_found")
        caller.check_access(session)
        return Subject(session, call)

    async def _session(self, session_id: str) -> Session | None:
        session = await self._store.session(session_id)
        return session if session is not None and session.run_id == self._run_id else None

    async def _named_call(self, caller: Caller, asked: FeedbackBody) -> Call | None:
        if asked.call_id is not None:
            found = await self._store.call(asked.call_id)
            calls = [] if found is None else [found]
        elif asked.response_id is not None:
            calls = await self._store.calls_by_request(asked.response_id)
        else:
            return None
        param = "call_id" if asked.call_id is not None else "response_id"
        # Another's is as if it were not there; and there are providers that call many answers the same.
        calls = [call for call in calls if await self._touches(caller, call)]
        if asked.session_id is not None and len(calls) > 1:
            calls = [call for call in calls if call.session_id == asked.session_id]
        if not calls:
            given = asked.call_id or asked.response_id
            raise ApiError(404, f"There is no answer {given!r}.", code="answer_not_found", param=param)
        if len(calls) > 1:
            ids = ", ".join(call.call_id for call in calls)
            raise bad_request(f"Several calls are called so: give the call_id of one of {ids}.", param)
        return calls[0]

    async def _touches(self, caller: Caller, call: Call) -> bool:
        session = await self._session(call.session_id)
        if session is None:
            return False
        try:
            caller.check_access(session)
        except ApiError:
            return False
        return True

    # --- what it says -----------------------------------------------------------------------------

    async def _feedback(
        self, subject: Subject, asked: FeedbackBody, client_key: str | None, caller: Caller
    ) -> tuple[Feedback, str | None]:
        """And why a correction in it cannot be trained on."""
        clean = self._redactor.redact_text
        session_id = subject.session.session_id
        call, ids, why, correction = subject.call, None, None, None
        if asked.correction is not None:
            correction = clean(asked.correction)
            call = call or await self._last_call(session_id)
            if correction != asked.correction:
                why = "a secret was cut out of the correction"
            elif _is_agents_word(subject.session, caller):
                why = "it came with the key of a session that the run itself plays: its agent's"
            else:
                ids, why = self._lesson(subject.session, call, correction)
        feedback = Feedback(
            feedback_id=self._id(session_id, asked.feedback_id, client_key),
            session_id=session_id,
            call_id=call.call_id if call else None,
            thumbs=None if asked.thumbs is None else THUMBS[asked.thumbs],
            score=asked.score,
            text=clean(asked.text),
            correction=correction,
            correction_ids=ids,
            author=clean(asked.author),
            created_at=time.time(),
        )
        return feedback, why

    def _id(self, session_id: str, given: str | None, client_key: str | None) -> str:
        found = given or (f"{session_id}/{client_key}" if client_key else new_id("fb"))
        if self._redactor.redact_text(found) != found:
            raise bad_request("The id looks like a secret; it would be stored.", "feedback_id")
        return found

    async def _last_call(self, session_id: str) -> Call:
        calls = await self._store.calls(session_id)
        whole = [call for call in calls if call.status is CallStatus.OK]
        if not whole:
            raise bad_request("This session has no answer to correct.", "correction", "invalid_value")
        return whole[-1]

    def _lesson(self, session: Session, call: Call, text: str) -> tuple[Ids | None, str | None]:
        """The correction as tokens, or why there are none."""
        route = match_model_route(self._models, call.model)
        if session.channel is Channel.VAL:
            return None, "sessions of the val channel are not trained on"
        if route is not None and not route.trainable:
            return None, "this model is not to be trained on"
        if not len(call.prompt_ids):
            return None, f"the call's tokens were not kept: {call.reason}"
        if self._renderer is None:
            return None, "the model's tokenizer is not at hand"
        try:
            ids = encode_correction(self._renderer, call, text)
        except RenderError as error:
            return None, str(error)
        length, context = len(call.prompt_ids) + len(ids), self._context()
        if context is not None and length > context:
            return None, f"with its prompt it has {length} tokens, and the context is {context}"
        return ids, None


def _is_agents_word(session: Session, caller: Caller) -> bool:
    """Whether no person can have said it: the key of a session that a rollout plays is with its agent, which
    is not to rate or teach itself."""
    return caller.kind == "session" and session.channel is not Channel.LIVE


def _reward(feedback: Feedback, value: float, subject: Subject, caller: Caller) -> Reward:
    detail = {"feedback_id": feedback.feedback_id, "by": caller.kind}
    agents = _is_agents_word(subject.session, caller)
    return Reward(
        session_id=feedback.session_id,
        value=value,
        source=RewardSource.AGENT if agents else RewardSource.HUMAN,
        scorer=SCORER,
        call_id=subject.call.call_id if subject.call else None,
        detail=detail | ({"author": feedback.author} if feedback.author else {}),
        created_at=feedback.created_at,
        # With a prefix of its own: an id that a client chooses must not take the place of a scorer's.
        reward_id=correction_key(feedback.feedback_id),
    )


def _same(there: Feedback, given: Feedback, named: Call | None) -> bool:
    """Whether both say the same of the same. What was corrected as the last answer of its session stays the
    same when another answer follows."""
    subject = there.call_id == given.call_id or (named is None and given.correction is not None)
    return subject and all(
        getattr(there, name) == getattr(given, name)
        for name in ("session_id", "thumbs", "score", "text", "correction", "author")
    )
