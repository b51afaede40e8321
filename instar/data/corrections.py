"""Turns the corrections and preferences of people into samples.

A sample is the exact prompt of a call followed by a reply: the corrected one, or one of the two that a person
compared. Each step claims the oldest unclaimed corrections and preferences, and uses each once per epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from instar.config import RunConfig
from instar.data.advantages import normalize
from instar.data.supervised import PreferencePair, SupervisedBatch
from instar.live.base import find_held_out
from instar.store.base import Store, make_feedback_reward_id
from instar.types import (
    NOT_SAMPLED,
    Call,
    Claim,
    ClaimOutcome,
    Feedback,
    Floats,
    Ids,
    Json,
    Sample,
    Span,
)

OTHER_REPLY_SUFFIX = "/other"
"""The end of the sample key of a compared reply that belongs to another session."""


async def load_feedback(store: Store, config: RunConfig, step: int, epoch: int) -> SupervisedBatch:
    """Load the corrections and preferences for a step, and the claims that the step must store."""
    corrections = await load_corrections(store, config, step, epoch)
    return corrections.merge(await load_preferences(store, config, step, epoch))


async def load_corrections(store: Store, config: RunConfig, step: int, epoch: int) -> SupervisedBatch:
    """Load the corrections for a step. Those that can never be trained on are claimed as dropped, without a
    step. The batch is empty if `corrections.weight` is 0. Corrections of live replies are used only if the
    run trains on the agent's live sessions and the session is not held out."""
    section, run_id = config.trainer.corrections, config.name
    if section.weight == 0:
        return SupervisedBatch()
    batch = SupervisedBatch()
    for feedback in await store.corrections(run_id, epoch, section.per_step, config.trained_agents):
        call, drop_reason = await _load_subject(store, config, feedback)
        claim = _make_claim(feedback, config, step, epoch)
        if call is None or feedback.correction_ids is None or not len(feedback.correction_ids):
            batch.drops.append(_make_drop(claim, drop_reason or "no_tokens"))
            continue
        batch.corrections.append(
            _make_sample(claim.sample_key, call, feedback.correction_ids, weight=section.weight)
        )
        batch.replies.extend(_make_replies(claim.sample_key, call))
        batch.claims.append(replace(claim, advantage=section.weight))
    corrections = normalize(batch.corrections, config.trainer.advantage.normalize)
    return replace(batch, corrections=corrections)


async def load_preferences(store: Store, config: RunConfig, step: int, epoch: int) -> SupervisedBatch:
    """Load the preferences for a step, as `load_corrections` does for corrections. If the two replies belong
    to different sessions, the step claims a sample of each, so that deleting either session is noticed."""
    section, run_id = config.trainer.preferences, config.name
    if section.weight == 0:
        return SupervisedBatch()
    batch = SupervisedBatch()
    for feedback in await store.preferences(run_id, epoch, section.per_step, config.trained_agents):
        call, drop_reason = await _load_subject(store, config, feedback)
        other_call = None if feedback.other_call_id is None else await store.call(feedback.other_call_id)
        if other_call is not None and await _is_held_out(store, config, other_call.session_id):
            drop_reason = "held_out"
        claim = _make_claim(feedback, config, step, epoch)
        if call is None or drop_reason or feedback.other_ids is None or not len(call.sampled_ids):
            batch.drops.append(_make_drop(claim, drop_reason or "no_tokens"))
            continue
        other_session = call.session_id if other_call is None else other_call.session_id
        key = claim.sample_key
        this = _make_sample(key, call, call.sampled_ids)
        other = replace(
            _make_sample(key + OTHER_REPLY_SUFFIX, call, feedback.other_ids), session_id=other_session
        )
        batch.pairs.append(
            PreferencePair(this, other) if feedback.preferred == "this" else PreferencePair(other, this)
        )
        batch.replies.extend(_make_replies(key, call))
        batch.claims.append(replace(claim, advantage=section.weight))
        if other_session != call.session_id:
            other_claim = replace(claim, sample_key=other.sample_key, session_id=other_session)
            batch.claims.append(replace(other_claim, advantage=section.weight))
    return batch


async def _load_subject(
    store: Store, config: RunConfig, feedback: Feedback
) -> tuple[Call | None, str | None]:
    """Return the call that the feedback is about, or None and the reason why it cannot be trained on."""
    call = None if feedback.call_id is None else await store.call(feedback.call_id)
    if call is None or not len(call.prompt_ids):
        return None, "no_tokens"
    if await _is_held_out(store, config, feedback.session_id):
        return None, "held_out"
    return call, None


async def _is_held_out(store: Store, config: RunConfig, session_id: str) -> bool:
    session = await store.session(session_id) if config.has_gate else None
    return session is not None and bool(await find_held_out(store, [session]))


def _make_claim(feedback: Feedback, config: RunConfig, step: int, epoch: int) -> Claim:
    return Claim(
        run_id=config.name,
        policy_id=config.policy_id,
        epoch=epoch,
        sample_key=make_feedback_reward_id(feedback.feedback_id),
        session_id=feedback.session_id,
        group_id=None,
        outcome=ClaimOutcome.TRAINED,
        step=step,
    )


def _make_drop(claim: Claim, reason: str) -> Claim:
    return replace(claim, outcome=ClaimOutcome.DROPPED, step=None, reason=reason)


def _make_replies(key: str, call: Call) -> list[Sample]:
    """Return a sample with the call's own reply, or none if it has no tokens."""
    return [_make_sample(key, call, call.sampled_ids)] if len(call.sampled_ids) else []


def _make_sample(key: str, call: Call, reply: Ids, *, weight: float = 1.0) -> Sample:
    tokens: Ids = np.concatenate([call.prompt_ids, reply]).astype(np.int32)
    mask = np.zeros(len(tokens), np.float32)
    mask[len(call.prompt_ids) :] = 1.0
    return Sample(
        sample_key=key,
        session_id=call.session_id,
        token_ids=tokens,
        mask=mask,
        logprobs=np.full(len(tokens), np.nan, np.float32),
        advantages=mask * np.float32(weight),
        versions=np.full(len(tokens), NOT_SAMPLED, np.int32),
        spans=(Span(call.call_id, len(call.prompt_ids), len(reply)),),
    )


def report_corrections(corrections: Sequence[Sample], logprobs: Sequence[Floats]) -> Json:
    """Return the number of corrections and the mean negative logprob of their tokens. ``logprobs`` begins
    with those of the corrections."""
    if not corrections:
        return {}
    rows = zip(corrections, logprobs[: len(corrections)], strict=True)
    trained = np.concatenate([values[sample.mask > 0] for sample, values in rows])
    return {"corrections": len(corrections), "correction_loss": -float(trained.mean())}
