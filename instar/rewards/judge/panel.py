"""Puts a question to the judge as often as there are votes; asks, pays and waits for nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast
from weakref import WeakValueDictionary

from instar.config.judge import JudgeRewardConfig
from instar.errors import ScoreError
from instar.rewards.base import ScoringContext
from instar.rewards.judge.answers import UnparseableAnswer, candidate_answers, truncate
from instar.rewards.judge.budget import JudgeBudget
from instar.rewards.judge.rubric import JudgePromptPart, JudgeQuestion, Rubric, digest
from instar.rewards.judge.run_model import RunModelEndpoint
from instar.rewards.judge.wire import HttpJudgeEndpoint, JudgeEndpoint, JudgeReply
from instar.types import Json, new_id

T = TypeVar("T")
ReadAnswer = Callable[[Json], T]
"""From the JSON of an answer to what it says. Raises UnparseableAnswer."""

CHARS_PER_TOKEN = 3
"""A cautious guess at what a question will cost."""


@dataclass(frozen=True, slots=True)
class JudgeVote(Generic[T]):
    answer: T
    cost: float
    """0 for an answer that was paid for by another session."""


class JudgePanel:
    def __init__(self, config: JudgeRewardConfig, rubric: Rubric) -> None:
        self.config = config
        self.rubric = rubric
        self._slots = asyncio.Semaphore(config.concurrency)
        self._asking: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._context: ScoringContext | None = None
        self._endpoint: JudgeEndpoint | None = None
        self._budget: JudgeBudget | None = None
        self._settings = [
            *(config.endpoint, config.dialect, config.model, config.temperature, config.max_tokens),
            *(config.structured, rubric.version, config.max_prompt_chars),
        ]

    @property
    def version(self) -> str:
        """Of whatever an answer depends on."""
        settings = self.config
        own = [settings.rubric, settings.votes, settings.scale, settings.pairs, settings.signals.model_dump()]
        return digest([self._settings, own]).hex()[:12]

    async def start(self, context: ScoringContext) -> None:
        self._context = context
        own = self.config.endpoint == "self"
        self._endpoint = RunModelEndpoint(self.config, context) if own else HttpJudgeEndpoint(self.config)
        self._budget = await JudgeBudget.for_run(context)

    async def close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()

    async def ask(
        self, parts: Sequence[JudgePromptPart], read: ReadAnswer[T], session_id: str, **fields: str
    ) -> list[JudgeVote[T]]:
        """All votes, at once. Raises ScoreError, once each has come or failed: what came is kept, and is not
        asked for again."""
        low, high = self.config.scale
        question = JudgeQuestion(parts, {**fields, "low": f"{low:g}", "high": f"{high:g}"})
        return await gather_all([self._vote(question, read, session_id, i) for i in range(self.config.votes)])

    async def _vote(
        self, question: JudgeQuestion, read: ReadAnswer[T], session_id: str, number: int
    ) -> JudgeVote[T]:
        asked = [[part.label, part.text] for part in question.parts]
        key = digest([self._settings, dict(question.fields), asked, number])
        assert self._context is not None
        lock = self._asking.get(key) or asyncio.Lock()
        self._asking[key] = lock
        async with lock:
            if (kept := await self._context.store.judgment(key)) is None:
                kept = await self._ask(question, read, session_id, key)
        return JudgeVote(read(kept["answer"]), kept["cost"] if kept["session"] == session_id else 0.0)

    async def _ask(self, question: JudgeQuestion, read: ReadAnswer[T], session_id: str, key: bytes) -> Json:
        assert self._context is not None
        assert self._budget is not None
        assert self._endpoint is not None
        system, user = self.rubric.render(question)
        tokens = (len(system) + len(user)) / CHARS_PER_TOKEN
        async with (
            self._slots,
            self._budget.reserve(self.config.budget, self._price(tokens, self.config.max_tokens)),
        ):
            reply = await self._endpoint.ask(system, user, self.rubric.schema)
            cost = self._price(reply.input_tokens, reply.output_tokens)
            self._budget.record_payment(cost)
            try:
                answer = _answer(reply, read)
            except UnparseableAnswer as error:
                # Paid for all the same: it counts, under a key that nobody asks for.
                useless = {"garbage": truncate(reply.text), "session": session_id}
                await self._context.store.put_judgment(
                    digest([key.hex(), new_id("garbage")]), self._context.run_id, useless, cost
                )
                raise ScoreError(str(error), retryable=True) from error
            kept: Json = {"answer": answer, "cost": cost, "session": session_id}
            await self._context.store.put_judgment(key, self._context.run_id, kept, cost)
        return kept

    def _price(self, tokens_in: float, tokens_out: float) -> float:
        return (tokens_in * self.config.input_price + tokens_out * self.config.output_price) / 1e6


def _answer(reply: JudgeReply, read: ReadAnswer[T]) -> Json:
    wrong = "there is no JSON in it"
    for candidate in candidate_answers(reply):
        try:
            read(candidate)
        except UnparseableAnswer as error:
            wrong = str(error)
        else:
            return candidate
    cut = " (it was cut off at max_tokens)" if reply.is_truncated else ""
    raise UnparseableAnswer(f"the judge's answer cannot be read: {wrong}{cut}")


async def gather_all(asked: Sequence[Awaitable[T]]) -> list[T]:
    """Waits for all of them, also when some fail. Then raises what stands most against another try."""
    results = await asyncio.gather(*asked, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    if not failures:
        return cast("list[T]", results)
    raise max(failures, key=_gravity)


def _gravity(failure: BaseException) -> tuple[bool, bool, float]:
    if not isinstance(failure, ScoreError):
        return True, True, 0.0
    return False, not failure.retryable, failure.retry_after or 0.0
