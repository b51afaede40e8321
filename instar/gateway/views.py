"""Sessions as the control API shows and takes them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from instar.gateway.base import (
    SAMPLING_KEYS,
    CallView,
    RewardBody,
    ScoreBody,
    SessionView,
    bad_request,
    to_reward_body,
)
from instar.types import Call, Json, Reward, Score, Session

SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (1e-6, 1),
    "max_tokens": (1, math.inf),
}


def session_view(session: Session, calls: Sequence[Call], rewards: Sequence[Reward]) -> SessionView:
    return SessionView(
        session_id=session.session_id,
        run_id=session.run_id,
        agent_id=session.agent_id,
        policy_id=session.policy_id,
        channel=session.channel,
        status=session.status,
        group_id=session.group_id,
        slot=session.slot,
        attempt=session.attempt,
        task_id=session.task_id,
        reason=session.reason,
        metadata=session.metadata,
        created_at=session.created_at,
        ended_at=session.ended_at,
        calls=[_call_view(call) for call in calls],
        rewards=[to_reward_body(reward) for reward in rewards],
    )


def check_sampling(sampling: dict[str, Any]) -> None:
    for name, value in sampling.items():
        if name not in SAMPLING_KEYS:
            known = ", ".join(sorted(SAMPLING_KEYS))
            raise bad_request(f"A session cannot force {name!r}; it can force {known}.", f"sampling.{name}")
        whole = name in ("top_k", "max_tokens")
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or value < 0:
            raise bad_request(f"'sampling.{name}' is not a number of its kind.", f"sampling.{name}")
        low, high = SAMPLING_RANGES.get(name, (0, math.inf))
        if not low <= value <= high:
            raise bad_request(f"'sampling.{name}' is {value}, out of range.", f"sampling.{name}")


def score_row(session_id: str, given: ScoreBody, reason: str | None) -> Score:
    return Score(session_id, given.scorer, given.state, given.attempts, reason, time.time())


def reward_row(session_id: str, given: RewardBody, detail: Json) -> Reward:
    return Reward(
        session_id=session_id,
        value=given.value,
        source=given.source,
        scorer=given.scorer,
        call_id=given.call_id,
        detail=detail,
        created_at=time.time(),
        reward_id=given.reward_id,
        scorer_version=given.scorer_version,
        cost=given.cost,
    )


def _call_view(call: Call) -> CallView:
    return CallView(
        call_id=call.call_id,
        parent_id=call.parent_id,
        link=call.link,
        status=call.status,
        trainable=call.trainable,
        reason=call.reason,
        finish_reason=call.finish_reason,
        prompt_tokens=len(call.prompt_ids),
        sampled_tokens=len(call.sampled_ids),
        reply=dict(call.reply),
    )
