"""The OpenAI Agents SDK over Responses and chat, with and without streaming and handoffs."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from job import Job, JobResult, calc, run_jobs
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def converse(job: Job, job_result: JobResult) -> None:
    client = AsyncOpenAI(**job.openai_options)
    model_class = OpenAIResponsesModel if "responses" in job.flags else OpenAIChatCompletionsModel
    model = model_class(model="instar", openai_client=client)
    options: Any = {"model": model, "model_settings": ModelSettings(include_usage=True)}
    agent = Agent(name="Worker", instructions="Work it out.", tools=[function_tool(calc)], **options)
    if "handoff" in job.flags:
        agent = Agent(name="Front", instructions="Hand it over.", handoffs=[agent], **options)
    items: list[Any] = []
    for question in (job.question, job.follow_up):
        items.append({"role": "user", "content": question})
        if "stream" in job.flags:
            result: Any = Runner.run_streamed(agent, items)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, items)
        job_result.answers.append(result.final_output)
        job_result.usage += [(r.usage.input_tokens, r.usage.output_tokens) for r in result.raw_responses]
        items, agent = result.to_input_list(), result.last_agent
    await client.close()


def run(job: Job, job_result: JobResult) -> None:
    asyncio.run(converse(job, job_result))


run_jobs(run)
