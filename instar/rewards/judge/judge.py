"""The base class of all judges, and their budget. Answers are stored, so that none is paid for twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

from instar.config.judge import BudgetConfig, JudgeRewardConfig
from instar.errors import ScoreError
from instar.rewards.base import JUDGE_AGENT, Scorer, ScoringContext, Transcript
from instar.rewards.judge.answers import MAX_TEXT_CHARS, UnparseableAnswer, find_candidate_answers
from instar.rewards.judge.endpoint import HttpJudgeEndpoint, JudgeEndpoint, JudgeReply, RunModelEndpoint
from instar.rewards.judge.rubric import JudgePromptPart, Rubric, hash_json
from instar.rewards.judge.session_steps import render_task
from instar.store.base import Store
from instar.types import UNTRAINABLE, Call, Json, Reward, RewardSource, Task, new_id

T = TypeVar("T")
ParseAnswer = Callable[[Json], T]
"""Converts an answer from JSON. Raises UnparseableAnswer if the JSON is not a valid answer."""

CHARS_PER_TOKEN = 3
"""A low estimate of the characters per token, so that the cost of a question is not underestimated."""
_budgets: WeakKeyDictionary[Store, dict[str, JudgeBudget]] = WeakKeyDictionary()


class JudgeBudget:
    """The calls and dollars that the run's judges have spent, including in earlier processes."""

    def __init__(self, calls: int, dollars: float) -> None:
        self.calls = calls
        self.dollars = dollars
        self._pending_calls = 0
        self._pending_dollars = 0.0
        self._released = asyncio.Event()

    @classmethod
    async def for_run(cls, context: ScoringContext) -> JudgeBudget:
        calls, dollars = await context.store.judgment_totals(context.run_id)
        return _budgets.setdefault(context.store, {}).setdefault(context.run_id, cls(calls, dollars))

    @asynccontextmanager
    async def reserve(self, budget: BudgetConfig, max_cost: float) -> AsyncGenerator[None]:
        """Reserve ``max_cost`` dollars for one call. Wait while calls in progress have reserved the rest of
        the budget. Raises ScoreError if the call does not fit into the unspent budget."""
        while not self._fits(budget, self._pending_calls, self._pending_dollars + max_cost):
            if not self._fits(budget, 0, max_cost):
                if budget.calls is not None and self.calls >= budget.calls:
                    raise ScoreError(f"the budget of {budget.calls} answers is spent; raise budget.calls")
                left = max(0.0, (budget.dollars or 0.0) - self.dollars)
                raise ScoreError(
                    f"an answer may cost ${max_cost:.4f}, but only ${left:.4f} of the judges' budget of "
                    f"${budget.dollars:g} is left; raise budget.dollars"
                )
            # The calls in progress may cost less than was reserved for them.
            await self._released.wait()
        self._pending_calls += 1
        self._pending_dollars += max_cost
        try:
            yield
        finally:
            self._pending_calls -= 1
            self._pending_dollars -= max_cost
            self._released.set()
            self._released = asyncio.Event()

    def _fits(self, budget: BudgetConfig, pending_calls: int, dollars: float) -> bool:
        calls_fit = budget.calls is None or self.calls + pending_calls < budget.calls
        return calls_fit and (budget.dollars is None or self.dollars + dollars <= budget.dollars)


@dataclass(frozen=True, slots=True)
class JudgeVote(Generic[T]):
    answer: T
    cost: float
    """The cost in dollars, or 0 if the answer was requested and paid for in another session."""


class Judge(Scorer):
    background = True

    def __init__(self, config: JudgeRewardConfig) -> None:
        self.config = config
        self.rubric = Rubric.load(config.rubric, config.criteria)
        self.name = f"judge:{config.name or config.rubric}"
        self.max_session_chars = config.max_prompt_chars * 3 // 4
        self._answer_settings = [
            *(config.endpoint, config.dialect, config.model, config.temperature, config.max_tokens),
            *(config.structured, self.rubric.version, config.max_prompt_chars),
        ]
        reward_settings = [config.rubric, config.votes, config.scale, config.pairs]
        all_settings = [self._answer_settings, [*reward_settings, config.signals.model_dump()]]
        self.version = hash_json(all_settings).hex()[:12]
        self._slots = asyncio.Semaphore(config.concurrency)
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """A lock for each question in progress, by key."""
        self._context: ScoringContext | None = None
        self._endpoint: JudgeEndpoint | None = None
        self._budget: JudgeBudget | None = None

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

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        if not transcript.calls:
            raise ScoreError("the session has no calls, so it cannot be judged")
        if self._context is not None and any(call.model == JUDGE_AGENT for call in transcript.calls):
            # Agents can also send the judge's model name, but only judges tag their sessions as untrainable.
            tags = await self._context.store.tags([transcript.session_id])
            if any(tag.name == UNTRAINABLE for tag in tags[transcript.session_id]):
                return []  # the run's own model is the judge in this session
        return await self.judge(task, transcript)

    async def judge(self, task: Task, transcript: Transcript) -> list[Reward]:
        raise NotImplementedError

    def build_task_parts(self, task: Task) -> list[JudgePromptPart]:
        """Return the prompt parts that describe the task, limited to a quarter of the prompt."""
        return render_task(task, self.config.max_prompt_chars // 4)

    def build_reward(
        self, session_id: str, value: float, detail: Json, cost: float, call: Call | None = None
    ) -> Reward:
        return Reward(
            session_id,
            value,
            RewardSource.JUDGE,
            scorer=self.name,
            call_id=call.call_id if call else None,
            detail=detail,
            scorer_version=self.version,
            cost=cost,
        )

    async def ask(
        self, parts: Sequence[JudgePromptPart], parse: ParseAnswer[T], session_id: str, **fields: str
    ) -> list[JudgeVote[T]]:
        """Request all votes concurrently and return them. If a request fails, raise its error after all
        requests have finished. Votes that have arrived are stored and not requested again."""
        low, high = self.config.scale
        fields |= {"low": f"{low:g}", "high": f"{high:g}"}
        hashed_parts = [[part.label, part.text] for part in parts]
        assert self._context is not None
        store = self._context.store

        async def get_vote(number: int) -> JudgeVote[T]:
            key = hash_json([self._answer_settings, fields, hashed_parts, number])
            async with self._locks.setdefault(key, asyncio.Lock()):
                if (stored := await store.judgment(key)) is None:
                    prompt = self.rubric.render(parts, fields)
                    stored = await self._request_judgment(key, *prompt, parse, session_id)
            cost = stored["cost"] if stored["session"] == session_id else 0.0
            return JudgeVote(parse(stored["answer"]), cost)

        return await gather_all([get_vote(number) for number in range(self.config.votes)])

    async def _request_judgment(
        self, key: bytes, system: str, user: str, parse: ParseAnswer[T], session_id: str
    ) -> Json:
        assert self._context is not None
        assert self._budget is not None
        assert self._endpoint is not None
        store, run_id = self._context.store, self._context.run_id
        prompt_tokens = (len(system) + len(user)) / CHARS_PER_TOKEN
        max_cost = self._compute_cost(prompt_tokens, self.config.max_tokens)
        async with self._slots, self._budget.reserve(self.config.budget, max_cost):
            reply = await self._endpoint.ask(system, user, self.rubric.schema, session_id)
            cost = self._compute_cost(reply.input_tokens, reply.output_tokens)
            self._budget.calls += 1
            self._budget.dollars += cost
            try:
                answer = _find_answer(reply, user, parse)
            except UnparseableAnswer as error:
                # The unusable reply was paid for and counts towards the budget, so it gets its own key.
                unusable = {"unusable": reply.text[:MAX_TEXT_CHARS], "session": session_id}
                unusable_key = hash_json([key.hex(), new_id("unusable")])
                await store.put_judgment(unusable_key, run_id, unusable, cost, session_id)
                raise ScoreError(str(error), retryable=True) from error
            judgment: Json = {"answer": answer, "cost": cost, "session": session_id}
            await store.put_judgment(key, run_id, judgment, cost, session_id)
        return judgment

    def _compute_cost(self, input_tokens: float, output_tokens: float) -> float:
        return (input_tokens * self.config.input_price + output_tokens * self.config.output_price) / 1e6


def _find_answer(reply: JudgeReply, question: str, parse: ParseAnswer[T]) -> Json:
    problem = "it contains no JSON"
    for candidate in find_candidate_answers(reply, question):
        try:
            parse(candidate)
        except UnparseableAnswer as error:
            problem = str(error)
        else:
            return candidate
    truncated = " (it was truncated; raise max_tokens)" if reply.is_truncated else ""
    raise UnparseableAnswer(f"the judge's answer cannot be parsed: {problem}{truncated}")


async def gather_all(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Wait for all awaitables and return their results. If any fail, raise the most severe error: one that is
    not a ScoreError, else one that is not retryable, else the one with the longest retry delay."""

    def get_severity(failure: BaseException) -> tuple[bool, bool, float]:
        if not isinstance(failure, ScoreError):
            return True, True, 0.0
        return False, not failure.retryable, failure.retry_after or 0.0

    results = await asyncio.gather(*awaitables, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        raise max(failures, key=get_severity)
    return cast("list[T]", results)
