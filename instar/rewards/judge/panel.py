"""Collects a judge's votes on a question. No answer is requested or paid for twice."""

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
from instar.rewards.judge.endpoint import HttpJudgeEndpoint, JudgeEndpoint, JudgeReply
from instar.rewards.judge.rubric import JudgePromptPart, JudgeQuestion, Rubric, digest
from instar.rewards.judge.run_model import RunModelEndpoint
from instar.types import Json, new_id

T = TypeVar("T")
ReadAnswer = Callable[[Json], T]
"""Converts the JSON of an answer. Raises UnparseableAnswer if the JSON does not match."""

CHARS_PER_TOKEN = 3
"""A low estimate of the characters per token, so that the cost of a question is not underestimated."""


@dataclass(frozen=True, slots=True)
class JudgeVote(Generic[T]):
    answer: T
    cost: float
    """The cost in dollars; 0 if a different session paid for the answer."""


class JudgePanel:
    def __init__(self, config: JudgeRewardConfig, rubric: Rubric) -> None:
        self.config = config
        self.rubric = rubric
        self._slots = asyncio.Semaphore(config.concurrency)
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """A lock for each question in progress, by key."""
        self._context: ScoringContext | None = None
        self._endpoint: JudgeEndpoint | None = None
        self._budget: JudgeBudget | None = None
        self._settings = [
            *(config.endpoint, config.dialect, config.model, config.temperature, config.max_tokens),
            *(config.structured, rubric.version, config.max_prompt_chars),
        ]

    @property
    def version(self) -> str:
        """A hash of all settings that affect a reward."""
        config = self.config
        reward_settings = [
            *(config.rubric, config.votes, config.scale, config.pairs),
            config.signals.model_dump(),
        ]
        return digest([self._settings, reward_settings]).hex()[:12]

    async def start(self, context: ScoringContext) -> None:
        self._context = context
        is_run_model = self.config.endpoint == "self"
        self._endpoint = (
            RunModelEndpoint(self.config, context) if is_run_model else HttpJudgeEndpoint(self.config)
        )
        self._budget = await JudgeBudget.for_run(context)

    async def close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()

    async def ask(
        self, parts: Sequence[JudgePromptPart], read: ReadAnswer[T], session_id: str, **fields: str
    ) -> list[JudgeVote[T]]:
        """Return all votes, which are requested concurrently. If any vote fails, raises ScoreError after all
        have finished; votes that arrived are stored and not requested again."""
        low, high = self.config.scale
        question = JudgeQuestion(parts, {**fields, "low": f"{low:g}", "high": f"{high:g}"})
        return await gather_all([self._vote(question, read, session_id, i) for i in range(self.config.votes)])

    async def _vote(
        self, question: JudgeQuestion, read: ReadAnswer[T], session_id: str, number: int
    ) -> JudgeVote[T]:
        parts = [[part.label, part.text] for part in question.parts]
        key = digest([self._settings, dict(question.fields), parts, number])
        assert self._context is not None
        lock = self._locks.get(key) or asyncio.Lock()
        self._locks[key] = lock
        async with lock:
            if (stored := await self._context.store.judgment(key)) is None:
                stored = await self._request(question, read, session_id, key)
        return JudgeVote(read(stored["answer"]), stored["cost"] if stored["session"] == session_id else 0.0)

    async def _request(
        self, question: JudgeQuestion, read: ReadAnswer[T], session_id: str, key: bytes
    ) -> Json:
        """Request an answer, store it and return it."""
        assert self._context is not None
        assert self._budget is not None
        assert self._endpoint is not None
        store, run_id = self._context.store, self._context.run_id
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
                answer = _find_answer(reply, read)
            except UnparseableAnswer as error:
                # The unusable reply was paid for and counts towards the budget, so it gets its own key.
                unusable = {"garbage": truncate(reply.text), "session": session_id}
                await store.put_judgment(digest([key.hex(), new_id("garbage")]), run_id, unusable, cost)
                raise ScoreError(str(error), retryable=True) from error
            judgment: Json = {"answer": answer, "cost": cost, "session": session_id}
            await store.put_judgment(key, run_id, judgment, cost)
        return judgment

    def _price(self, input_tokens: float, output_tokens: float) -> float:
        return (input_tokens * self.config.input_price + output_tokens * self.config.output_price) / 1e6


def _find_answer(reply: JudgeReply, read: ReadAnswer[T]) -> Json:
    problem = "there is no JSON in it"
    for candidate in candidate_answers(reply):
        try:
            read(candidate)
        except UnparseableAnswer as error:
            problem = str(error)
        else:
            return candidate
    truncated = " (it was truncated at max_tokens)" if reply.is_truncated else ""
    raise UnparseableAnswer(f"the judge's answer cannot be parsed: {problem}{truncated}")


async def gather_all(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Return all results. If any failed, wait for the rest, then raise the error least worth a retry."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    if not failures:
        return cast("list[T]", results)
    raise max(failures, key=_severity)


def _severity(failure: BaseException) -> tuple[bool, bool, float]:
    if not isinstance(failure, ScoreError):
        return True, True, 0.0
    return False, not failure.retryable, failure.retry_after or 0.0
