"""Turns a session's call graph into flat samples, one for each root-to-leaf walk.

A call extends another call if its prompt consists of the other call's prompt and sampled tokens, followed by
new tokens. Any other call starts a new walk. Walks that share calls repeat the tokens of these calls, but a
sampled token is trained only in the first of these walks::

    a ── b ── c      sample 0: a b c, all trained
          └── d      sample 1: a b d, only d trained
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from instar.errors import StoreError
from instar.types import NOT_SAMPLED, Call, CallStatus, Link, Sample, Session, Span


def linearize(session: Session, calls: Sequence[Call], *, requires_logprobs: bool = True) -> list[Sample]:
    """Return the session's samples, with zero advantages, in the order of their last calls.

    Walks that train no token are omitted, but still numbered, so that a sample's key depends only on the
    session's graph. Raises StoreError if a call does not extend its parent as recorded or, with
    ``requires_logprobs``, if a trainable token has no logprob.
    """
    by_id = {call.call_id: call for call in calls}
    parents = {call.call_id: _find_parent(call, by_id) for call in calls}
    extended = {parent.call_id for parent in parents.values() if parent}
    prefix = f"{session.group_id}/{session.slot}" if session.group_id else session.session_id
    trained: set[str] = set()
    samples: list[Sample] = []
    for ordinal, leaf in enumerate(call for call in calls if call.call_id not in extended):
        walk: list[Call] = []
        call: Call | None = leaf
        while call:
            walk.append(call)
            call = parents[call.call_id]
        sample = _flatten(f"{prefix}/{ordinal}", session, walk[::-1], trained, requires_logprobs)
        if sample.trained_tokens:
            samples.append(sample)
    return samples


def with_advantage(sample: Sample, value: float, per_call: Mapping[str, float] | None = None) -> Sample:
    """Return a copy with the advantage ``value`` plus its call's ``per_call`` value on each trained token."""
    advantages = np.full(len(sample), value, dtype=np.float32)
    for span in sample.spans:
        advantages[span.start : span.start + span.length] += (per_call or {}).get(span.call_id, 0.0)
    return replace(sample, advantages=advantages * sample.mask)


def _find_parent(call: Call, by_id: Mapping[str, Call]) -> Call | None:
    # Calls that were sampled by a provider or contain a secret have no prompt tokens.
    if call.link is not Link.EXTENDS or not len(call.prompt_ids):
        return None
    parent = by_id.get(call.parent_id or "")
    if parent is None:
        raise StoreError(
            f"call {call.call_id} extends call {call.parent_id}, which is not in session {call.session_id}"
        )
    prefix = parent.sequence
    if len(call.prompt_ids) < len(prefix) or not np.array_equal(call.prompt_ids[: len(prefix)], prefix):
        raise StoreError(
            f"call {call.call_id} is recorded as extending call {parent.call_id}, but its prompt does not "
            f"begin with that call's {len(prefix)} tokens"
        )
    return parent


def _flatten(
    key: str, session: Session, walk: Sequence[Call], trained: set[str], requires_logprobs: bool
) -> Sample:
    """Turn the calls of a walk into one sample, and add the calls that it trains to ``trained``."""
    tokens = walk[-1].sequence.astype(np.int32, copy=False)
    mask = np.zeros(len(tokens), dtype=np.float32)
    logprobs = np.full(len(tokens), np.nan, dtype=np.float32)
    versions = np.full(len(tokens), NOT_SAMPLED, dtype=np.int32)
    behavior = logprobs.copy() if any(call.behavior_logprobs is not None for call in walk) else None
    spans: list[Span] = []
    for call in walk:
        start, length = len(call.prompt_ids), len(call.sampled_ids)
        if not length:
            continue
        span = slice(start, start + length)
        logprobs[span] = call.logprobs
        versions[span] = call.versions
        if behavior is not None:
            behavior[span] = call.logprobs if call.behavior_logprobs is None else call.behavior_logprobs
        spans.append(Span(call.call_id, start, length))
        if call.trainable and call.status is CallStatus.OK and call.call_id not in trained:
            if requires_logprobs:
                _require_logprobs(call)
            trained.add(call.call_id)
            mask[span] = 1.0
    return Sample(
        sample_key=key,
        session_id=session.session_id,
        token_ids=tokens,
        mask=mask,
        logprobs=logprobs,
        advantages=np.zeros(len(tokens), dtype=np.float32),
        versions=versions,
        group_id=session.group_id,
        behavior_logprobs=behavior,
        spans=tuple(spans),
    )


def _require_logprobs(call: Call) -> None:
    arrays = (call.logprobs, call.behavior_logprobs)
    if any(array is not None and np.isnan(array).any() for array in arrays):
        raise StoreError(f"call {call.call_id} is marked trainable, but some of its logprobs are missing")
