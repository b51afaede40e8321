"""Turns human corrections into samples for the cross-entropy loss.

A sample is the exact prompt of a call followed by the corrected reply. Each step claims the oldest unclaimed
corrections, and each correction is used once per epoch.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from instar.config import RunConfig
from instar.data.advantages import normalize
from instar.live.base import is_held_out
from instar.store.base import Store, make_feedback_reward_id
from instar.types import NOT_SAMPLED, Call, Channel, Claim, ClaimOutcome, Feedback, Floats, Ids, Sample, Span


@dataclass(frozen=True, slots=True)
class CorrectionBatch:
    samples: list[Sample] = field(default_factory=list[Sample])
    """Samples whose advantages are the weights of their tokens in the loss."""
    claims: list[Claim] = field(default_factory=list[Claim])

    def without(self, session_ids: Set[str]) -> CorrectionBatch:
        """Return the batch without the samples of these sessions. The weights of the others do not change."""
        return replace(self, samples=[s for s in self.samples if s.session_id not in session_ids])


async def load_corrections(store: Store, config: RunConfig, step: int, epoch: int) -> CorrectionBatch:
    """Load the corrections for a step, and the claims that the step must store. Corrections without tokens,
    and those of held-out sessions, are claimed as dropped. The batch is empty if `corrections.weight` is 0.
    Corrections of live replies are used only if the run trains on the agent's live sessions."""
    section, run_id = config.trainer.corrections, config.name
    if section.weight == 0:
        return CorrectionBatch()
    samples: list[Sample] = []
    claims: list[Claim] = []
    for feedback in await store.corrections(run_id, epoch, section.per_step, config.trained_agents):
        call = await store.call(feedback.call_id) if feedback.call_id is not None else None
        sample = None if call is None else _make_sample(feedback, call, section.weight)
        reason = None if sample else "no_tokens"
        if await _is_held_out(store, config, feedback.session_id):
            sample, reason = None, "held_out"
        if sample is not None:
            samples.append(sample)
        claims.append(
            Claim(
                run_id=run_id,
                epoch=epoch,
                sample_key=make_feedback_reward_id(feedback.feedback_id),
                session_id=feedback.session_id,
                group_id=None,
                outcome=ClaimOutcome.TRAINED if sample else ClaimOutcome.DROPPED,
                step=step,
                reason=reason,
                advantage=section.weight if sample else None,
            )
        )
    return CorrectionBatch(normalize(samples, config.trainer.advantage.normalize), claims)


async def _is_held_out(store: Store, config: RunConfig, session_id: str) -> bool:
    if not config.has_gate:
        return False
    session = await store.session(session_id)
    if session is None or session.channel is not Channel.LIVE:
        return False
    prompts = await store.first_prompts([session_id])
    return is_held_out(prompts.get(session_id, ()))


def _make_sample(feedback: Feedback, call: Call, weight: float) -> Sample | None:
    reply = feedback.correction_ids
    if reply is None or not len(reply) or not len(call.prompt_ids):
        return None
    tokens: Ids = np.concatenate([call.prompt_ids, reply]).astype(np.int32)
    mask = np.zeros(len(tokens), np.float32)
    mask[len(call.prompt_ids) :] = 1.0
    return Sample(
        sample_key=make_feedback_reward_id(feedback.feedback_id),
        session_id=feedback.session_id,
        token_ids=tokens,
        mask=mask,
        logprobs=np.full(len(tokens), np.nan, np.float32),
        advantages=mask * np.float32(weight),
        versions=np.full(len(tokens), NOT_SAMPLED, np.int32),
        spans=(Span(call.call_id, len(call.prompt_ids), len(reply)),),
    )


def compute_correction_loss(samples: Sequence[Sample], logprobs: Sequence[Floats]) -> float:
    """Return the mean negative logprob of the trained tokens."""
    trained = [new[sample.mask > 0] for sample, new in zip(samples, logprobs, strict=True)]
    return -float(np.concatenate(trained).mean())
