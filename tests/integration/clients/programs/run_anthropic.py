"""The `anthropic` SDK: sync and async, with and without streaming."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
from job import Job, JobResult, calc, run_jobs

TOOL: Any = {
    "name": "calc",
    "description": "Evaluate arithmetic.",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}


async def _stream_message(client: Any, request: dict[str, Any]) -> Any:
    async with client.messages.stream(**request) as stream:
        return await stream.get_final_message()


def send_request(job: Job, request: dict[str, Any]) -> Any:
    options = {"base_url": job.url, "api_key": job.key}
    use_streaming = "stream" in job.flags
    if "async" in job.flags:

        async def send() -> Any:
            async with anthropic.AsyncAnthropic(**options) as client:
                return await (
                    _stream_message(client, request) if use_streaming else client.messages.create(**request)
                )

        return asyncio.run(send())
    with anthropic.Anthropic(**options) as client:
        if not use_streaming:
            return client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            return stream.get_final_message()


def run(job: Job, job_result: JobResult) -> None:
    request: dict[str, Any] = {"model": "instar", "max_tokens": 500, "system": "Be exact.", "tools": [TOOL]}
    messages: list[Any] = []
    for question in (job.question, job.follow_up):
        messages.append({"role": "user", "content": question})
        while True:
            reply = send_request(job, {**request, "messages": messages})
            prompt_tokens = reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)
            job_result.usage.append((prompt_tokens, reply.usage.output_tokens))
            messages.append({"role": "assistant", "content": reply.content})
            tool_results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": calc(**block.input)}
                for block in reply.content
                if block.type == "tool_use"
            ]
            if not tool_results:
                job_result.answers.append(
                    "".join(block.text for block in reply.content if block.type == "text")
                )
                break
            messages.append({"role": "user", "content": tool_results})


run_jobs(run)
