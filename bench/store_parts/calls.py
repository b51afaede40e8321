"""Calls of a given size, as a gateway would record them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from instar.types import Call, Channel, Link, Message, Session, new_id

RUN = "bench"
WORDS = "the cat sat on a mat and looked at what there was to see from it today "


def a_session(**fields: object) -> Session:
    return Session(new_id("sess"), RUN, "agent", RUN, Channel.TRAIN, **fields)  # type: ignore[arg-type]


def turns(session: Session, size: int, count: int, version: int = 0) -> Iterator[Call]:
    """A conversation in which every call brings about ``size`` bytes: an eighth of them sampled tokens with
    their logprobs, a quarter prompt tokens, and the rest text."""
    sampled, prompt = max(1, size // 64), max(1, size // 16)
    text = (WORDS * (size // len(WORDS) + 1))[: max(8, size // 2)]
    rng = np.random.default_rng(size)
    before: Call | None = None
    for _ in range(count):
        before = _turn(session, before, rng, prompt, sampled, text, version)
        yield before


def _turn(
    session: Session,
    before: Call | None,
    rng: np.random.Generator,
    prompt: int,
    sampled: int,
    text: str,
    version: int,
) -> Call:
    new = rng.integers(0, 150_000, prompt, dtype=np.int32)
    asked: Message = {"role": "user", "content": text}
    call_id = new_id("call")
    return Call(
        call_id=call_id,
        session_id=session.session_id,
        run_id=session.run_id,
        agent_id=session.agent_id,
        policy_id=session.policy_id,
        request_id=call_id,
        prompt_ids=new if before is None else np.concatenate([before.sequence, new]),
        sampled_ids=rng.integers(0, 150_000, sampled, dtype=np.int32),
        logprobs=-rng.random(sampled, dtype=np.float32),
        versions=np.full(sampled, version, np.int32),
        messages=(asked,) if before is None else (*before.messages, before.reply, asked),
        reply={"role": "assistant", "content": text[: 4 * sampled]},
        finish_reason="stop",
        parent_id=before and before.call_id,
        link=Link.EXTENDS if before else Link.ROOT,
        base_id=before and before.call_id,
        base_tokens=len(before.sequence) if before else 0,
        base_messages=len(before.messages) + 1 if before else 0,
        started_at=1.0,
        ended_at=2.0,
    )
