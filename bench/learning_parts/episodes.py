"""Run agents in this process, without a gateway, and return each episode as one sequence of tokens.

TRL's rollouts and the evaluator use the same agents, prompts, parsers and scorers as `instar train`. Requests
and replies are converted by the gateway's chat dialect, so that an agent receives the same objects as from
the OpenAI SDK.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from instar.agents.openai_agent import OpenAIAgent
from instar.config import RunConfig
from instar.errors import AgentError, PromptTooLong
from instar.gateway.dialects.base import ModelRequest, ReplyChoice
from instar.gateway.dialects.chat import ChatDialect
from instar.record.base import Renderer
from instar.rewards.base import ScoringContext, Transcript
from instar.rewards.factory import create_scoring
from instar.rollout.agents import FunctionAgent
from instar.rollout.base import AgentSession
from instar.rollout.tasks import TaskSet
from instar.types import Call, Message, Task, new_id


@dataclass(frozen=True)
class SampledTokens:
    """The tokens of a reply with the stop token, and their logprobs if the generator returns them."""

    token_ids: list[int]
    logprobs: list[float] | None = None

    def truncate(self, limit: int) -> SampledTokens:
        return SampledTokens(self.token_ids[:limit], self.logprobs and self.logprobs[:limit])


Generate = Callable[[list[int], int], Awaitable[SampledTokens]]
"""Called with a prompt and the maximum number of tokens."""
GenerateBatch = Callable[[list[list[int]], list[int]], list[SampledTokens]]
"""Called with prompts and the maximum number of tokens of each."""


@dataclass(frozen=True)
class Episode:
    """A finished episode. ``completion_ids`` are all tokens after the first prompt. ``mask`` is 1 for tokens
    that were sampled, and 0 for the messages between two replies. ``logprobs`` are those of the sampled
    tokens, NaN if they are unknown, and 0 for the messages between."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float

    @staticmethod
    def from_calls(calls: Sequence[Call], reward: float) -> Episode:
        start, sequence = len(calls[0].prompt_ids), calls[-1].sequence
        mask = np.zeros(len(sequence), np.int32)
        logprobs = np.zeros(len(sequence), np.float32)
        for call in calls:
            reply = slice(len(call.prompt_ids), len(call.prompt_ids) + len(call.sampled_ids))
            mask[reply], logprobs[reply] = 1, call.logprobs
        return Episode(
            prompt_ids=sequence[:start].tolist(),
            completion_ids=sequence[start:].tolist(),
            mask=mask[start:].tolist(),
            logprobs=logprobs[start:].tolist(),
            reward=reward,
        )


class EpisodeRunner:
    """Runs the agent of a run config. ``start`` must be awaited before ``run``, in the same event loop."""

    def __init__(self, config: RunConfig, taskset: TaskSet, renderer: Renderer, generate: Generate) -> None:
        assert config.rollout is not None
        self._renderer = renderer
        self._generate = generate
        self._max_context = config.model.context_length
        self._scoring = create_scoring(config, taskset)
        self._dialect = ChatDialect()
        self._calls: dict[str, list[Call]] = {}
        """The calls of each running episode by session id."""
        self._agent = FunctionAgent(cast(Any, config.rollout.agent))
        # The agent object is shared by all users of its module, so only a copy gets the new method.
        function = copy.copy(cast(OpenAIAgent, self._agent.function))
        function.complete = self._complete
        self._agent.function = cast(Any, function)

    async def start(self) -> None:
        # Rules and returned rewards do not use the store, which only a judge would need.
        await self._scoring.start(ScoringContext("bench", cast(Any, None)))

    async def close(self) -> None:
        await self._scoring.close()

    async def run(self, task: Task) -> Episode:
        session = AgentSession(new_id("sess"), "http://unused", "unused")
        calls = self._calls[session.session_id] = []
        try:
            result = await self._agent.run(task, session)
        finally:
            del self._calls[session.session_id]
        scored = await self._scoring.score(task, Transcript(session.session_id, calls, result.reward))
        if not scored.rewards:
            raise AgentError(f"the task {task.task_id} got no reward: {scored.failure_reason}")
        return Episode.from_calls(calls, scored.rewards[-1].value)

    async def _complete(
        self, session: AgentSession, messages: list[Any], **options: Any
    ) -> ChatCompletionMessage:
        """Sample a reply. This method replaces `OpenAIAgent.complete`."""
        calls = self._calls[session.session_id]
        body = json.dumps({"model": session.model, "messages": messages, **options})
        request = self._dialect.parse_request(body.encode())
        prompt_ids = self._build_prompt(calls, request)
        context_left = self._max_context - len(prompt_ids)
        if context_left < 1:
            raise PromptTooLong(
                f"the prompt has {len(prompt_ids)} tokens; at most {self._max_context - 1} fit in the context"
            )
        sampled = await self._generate(prompt_ids, min(request.max_tokens or context_left, context_left))
        reply = self._renderer.parse(sampled.token_ids, request.tools, prompt_ids=prompt_ids)
        calls.append(_make_call(session.session_id, request, prompt_ids, sampled, reply))
        choice = ReplyChoice(reply, "stop", len(prompt_ids), len(sampled.token_ids))
        response = self._dialect.format_response(new_id("chatcmpl"), request, [choice])
        return ChatCompletion.model_validate_json(response).choices[0].message

    def _build_prompt(self, calls: Sequence[Call], request: ModelRequest) -> list[int]:
        if not calls:
            return self._renderer.render(request.messages, request.tools)
        last = calls[-1]
        known = len(last.messages)
        prompt_ids = None
        if request.messages[:known] == last.messages and _is_same_reply(request.messages[known], last.reply):
            new_messages = request.messages[known + 1 :]
            prompt_ids = self._renderer.extend(
                last.prompt_ids.tolist(), last.sampled_ids.tolist(), new_messages, request.tools
            )
        if prompt_ids is None:
            raise AgentError(
                "a call does not continue the previous call of its episode, so that the episode is not one "
                "sequence of tokens; use an agent that only appends messages"
            )
        return prompt_ids


class ReplyBatcher:
    """Collects the requests of concurrent episodes, and generates the replies in one batch as soon as all
    unfinished episodes wait for a reply."""

    def __init__(self, generate_batch: GenerateBatch) -> None:
        self._generate_batch = generate_batch
        self._unfinished = 0
        self._requests: list[tuple[list[int], int, asyncio.Future[SampledTokens]]] = []

    async def run_all(self, episodes: Sequence[Coroutine[Any, Any, Episode]]) -> list[Episode]:
        self._unfinished = len(episodes)
        return await asyncio.gather(*map(self._run, episodes))

    async def generate(self, prompt_ids: list[int], max_tokens: int) -> SampledTokens:
        future: asyncio.Future[SampledTokens] = asyncio.get_running_loop().create_future()
        self._requests.append((prompt_ids, max_tokens, future))
        self._generate_if_all_wait()
        return await future

    async def _run(self, episode: Coroutine[Any, Any, Episode]) -> Episode:
        try:
            return await episode
        finally:
            self._unfinished -= 1
            self._generate_if_all_wait()

    def _generate_if_all_wait(self) -> None:
        if not self._requests or len(self._requests) < self._unfinished:
            return
        requests, self._requests = self._requests, []
        replies = self._generate_batch(
            [prompt for prompt, _, _ in requests], [limit for _, limit, _ in requests]
        )
        for (_, limit, future), reply in zip(requests, replies, strict=True):
            future.set_result(reply.truncate(limit))


def _make_call(
    session_id: str, request: ModelRequest, prompt_ids: list[int], sampled: SampledTokens, reply: Message
) -> Call:
    count = len(sampled.token_ids)
    return Call(
        call_id=new_id("call"),
        session_id=session_id,
        run_id="bench",
        agent_id="bench",
        policy_id="bench",
        request_id=new_id("req"),
        prompt_ids=np.asarray(prompt_ids, np.int32),
        sampled_ids=np.asarray(sampled.token_ids, np.int32),
        logprobs=np.asarray(sampled.logprobs or [np.nan] * count, np.float32),
        versions=np.zeros(count, np.int32),
        messages=request.messages,
        reply=reply,
        finish_reason="stop",
        tools=request.tools,
    )


def _is_same_reply(message: Message, reply: Message) -> bool:
    is_same_text = (message["role"], message["content"]) == ("assistant", reply["content"])
    return is_same_text and message.get("tool_calls", []) == reply.get("tool_calls", [])
