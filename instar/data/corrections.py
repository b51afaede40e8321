"""Lessons: answers that people corrected, as samples for the cross-entropy loss.

A lesson is a call's exact prompt with the corrected answer behind it. A step takes the oldest ones that no
step has claimed; like every sample, each is trained once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from instar.config import TrainerConfig
from instar.data.advantages import normalize
from instar.store.base import Store, lesson_key
from instar.types import NOT_SAMPLED, Call, Claim, ClaimOutcome, Feedback, Floats, Ids, Sample, Span


@dataclass(frozen=True, slots=True)
class CorrectionBatch:
    samples: list[Sample] = field(default_factory=list[Sample])
    """Their advantages are what each token counts for in the step."""
    claims: list[Claim] = field(default_factory=list[Claim])


async def load_corrections(
    store: Store, run_id: str, config: TrainerConfig, step: int, epoch: int
) -> CorrectionBatch:
    """Those of a step; nothing is claimed yet."""
    section = config.corrections
    if section.weight == 0:
        return CorrectionBatch()
    samples: list[Sample] = []
    claims: list[Claim] = []
    for feedback in await store.lessons(run_id, epoch, section.per_step):
        call = await store.call(feedback.call_id) if feedback.call_id is not None else None
        sample = None if call is None else _sample(feedback, call, section.weight)
        claims.append(_claim(feedback, run_id, step, epoch, section.weight if sample else None))
        if sample is not None:
            samples.append(sample)
    return CorrectionBatch(normalize(samples, config.advantage.normalize), claims)


def _sample(feedback: Feedback, call: Call, weight: float) -> Sample | None:
    """None where there is nothing to say, or nothing that it would follow."""
    answer = feedback.correction_ids
    if answer is None or not len(answer) or not len(call.prompt_ids):
        return None
    tokens: Ids = np.concatenate([call.prompt_ids, answer]).astype(np.int32)
    mask = np.zeros(len(tokens), np.float32)
    mask[len(call.prompt_ids) :] = 1.0
    return Sample(
        sample_key=lesson_key(feedback.feedback_id),
        session_id=feedback.session_id,
        token_ids=tokens,
        mask=mask,
        logprobs=np.full(len(tokens), np.nan, np.float32),
        advantages=mask * np.float32(weight),
        versions=np.full(len(tokens), NOT_SAMPLED, np.int32),
        spans=(Span(call.call_id, len(call.prompt_ids), len(answer)),),
    )


def _claim(feedback: Feedback, run_id: str, step: int, epoch: int, weight: float | None) -> Claim:
    return Claim(
        run_id=run_id,
        epoch=epoch,
        sample_key=lesson_key(feedback.feedback_id),
        session_id=feedback.session_id,
        group_id=None,
        outcome=ClaimOutcome.DROPPED if weight is None else ClaimOutcome.TRAINED,
        step=step,
        reason="no_tokens" if weight is None else None,
        advantage=weight,
    )


def compute_correction_loss(samples: Sequence[Sample], logprobs: Sequence[Floats]) -> float:
    """How far the policy was from saying so: the mean over tokens of what they cost."""
    told = [new[sample.mask > 0] for sample, new in zip(samples, logprobs, strict=True)]
    return -float(np.concatenate(told).mean())
