"""pydantic-ai: its models for chat, Responses and Anthropic's Messages; streamed and not; a typed answer,
which it asks for through a tool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import Any

from anthropic import AsyncAnthropic
from job import Job, JobResult, calc, serve
from pydantic import BaseModel
from pydantic_ai import Agent, ModelResponse
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Answer(BaseModel):
    value: int


def model_of(job: Job) -> Any:
    if "messages" in job.words:
        client = AsyncAnthropic(base_url=job.url, api_key=job.key)
        return AnthropicModel("instar", provider=AnthropicProvider(anthropic_client=client))
    kind = OpenAIResponsesModel if "responses" in job.words else OpenAIChatModel
    return kind("instar", provider=OpenAIProvider(**job.openai))


async def follow(_: Any, events: AsyncIterable[Any]) -> None:
    """With a handler of events, every call of a run is streamed. (`run_stream` ends at the first text.)"""
    async for _event in events:
        pass


async def converse(job: Job, job_result: JobResult) -> None:
    kind: Any = Answer if "typed" in job.words else str
    agent = Agent(model_of(job), instructions="Work it out.", output_type=kind)
    agent.tool_plain(calc)
    history: list[Any] = []
    for question in (job.question, job.follow_up):
        handler = follow if "stream" in job.words else None
        result = await agent.run(question, message_history=history, event_stream_handler=handler)
        said: Any = result.output
        job_result.answers.append(said.value if isinstance(said, Answer) else said)
        job_result.usage += [
            (message.usage.input_tokens, message.usage.output_tokens)
            for message in result.new_messages()
            if isinstance(message, ModelResponse)
        ]
        history = result.all_messages()


def run(job: Job, job_result: JobResult) -> None:
    asyncio.run(converse(job, job_result))


serve(run)
