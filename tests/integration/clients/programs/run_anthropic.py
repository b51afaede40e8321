"""The `anthropic` SDK: sync and async, streamed and not."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
from job import Job, JobResult, calc, serve

TOOL: Any = {
    "name": "calc",
    "description": "Evaluate arithmetic.",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}


async def _streamed(client: Any, asked: dict[str, Any]) -> Any:
    async with client.messages.stream(**asked) as stream:
        return await stream.get_final_message()


def ask(job: Job, asked: dict[str, Any]) -> Any:
    options = {"base_url": job.url, "api_key": job.key}
    streams = "stream" in job.words
    if "async" in job.words:

        async def answer() -> Any:
            async with anthropic.AsyncAnthropic(**options) as client:
                return await (_streamed(client, asked) if streams else client.messages.create(**asked))

        return asyncio.run(answer())
    with anthropic.Anthropic(**options) as client:
        if not streams:
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            return stream.get_final_message()


def run(job: Job, job_result: JobResult) -> None:
    asked: dict[str, Any] = {"model": "instar", "max_tokens": 500, "system": "Be exact.", "tools": [TOOL]}
    messages: list[Any] = []
    for question in (job.question, job.follow_up):
        messages.append({"role": "user", "content": question})
        while True:
            answer = ask(job, {**asked, "messages": messages})
            prompt = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
            job_result.usage.append((prompt, answer.usage.output_tokens))
            messages.append({"role": "assistant", "content": answer.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": calc(**block.input)}
                for block in answer.content
                if block.type == "tool_use"
            ]
            if not results:
                job_result.answers.append(
                    "".join(block.text for block in answer.content if block.type == "text")
                )
                break
            messages.append({"role": "user", "content": results})


serve(run)
