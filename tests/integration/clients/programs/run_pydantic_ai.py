"""pydantic-ai over chat, Responses and Anthropic's Messages, with and without streaming, and with typed
answers, which it requests through a tool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import Any

from anthropic import AsyncAnthropic
from job import Job, JobResult, calc, run_jobs
from pydantic import BaseModel
from pydantic_ai import Agent, ModelResponse
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Answer(BaseModel):
    value: int


def create_model(job: Job) -> Any:
    if "messages" in job.flags:
        client = AsyncAnthropic(base_url=job.url, api_key=job.key)
        return AnthropicModel("instar", provider=AnthropicProvider(anthropic_client=client))
    model_class = OpenAIResponsesModel if "responses" in job.flags else OpenAIChatModel
    return model_class("instar", provider=OpenAIProvider(**job.openai_options))


async def consume_events(_: Any, events: AsyncIterable[Any]) -> None:
    """Discard the events. With an event handler, `run` streams every call; `run_stream` would stop at the
    first text."""
    async for _event in events:
        pass


async def converse(job: Job, job_result: JobResult) -> None:
    output_type: Any = Answer if "typed" in job.flags else str
    agent = Agent(create_model(job), instructions="Work it out.", output_type=output_type)
    agent.tool_plain(calc)
    history: list[Any] = []
    for question in (job.question, job.follow_up):
        handler = consume_events if "stream" in job.flags else None
        result = await agent.run(question, message_history=history, event_stream_handler=handler)
        output: Any = result.output
        job_result.answers.append(output.value if isinstance(output, Answer) else output)
        job_result.usage += [
            (message.usage.input_tokens, message.usage.output_tokens)
            for message in result.new_messages()
            if isinstance(message, ModelResponse)
        ]
        history = result.all_messages()


def run(job: Job, job_result: JobResult) -> None:
    asyncio.run(converse(job, job_result))


run_jobs(run)
