"""The `openai` SDK: chat, Responses (with the full history or the previous response id) and completions, sync
and async, with and without streaming."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from job import Job, JobResult, calc, run_jobs

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
FUNCTION = {"name": "calc", "description": "Evaluate arithmetic.", "parameters": PARAMETERS}


class VariantClient:
    """A client that is sync or async, streams or not, and always returns the complete response."""

    def __init__(self, job: Job) -> None:
        self._use_streaming = "stream" in job.flags
        self._loop = asyncio.new_event_loop() if "async" in job.flags else None
        self._client: Any = (
            openai.AsyncOpenAI(**job.openai_options) if self._loop else openai.OpenAI(**job.openai_options)
        )

    def create_chat_completion(self, **request: Any) -> Any:
        return self._send(self._client.chat.completions, "get_final_completion", request)

    def create_response(self, **request: Any) -> Any:
        return self._send(self._client.responses, "get_final_response", request)

    def create_completion(self, **request: Any) -> tuple[str, Any]:
        """Return the text and the usage."""
        if not self._use_streaming:
            completion = self._await_if_async(self._client.completions.create(**request))
            return completion.choices[0].text, completion.usage
        options = {"include_usage": True}
        stream = self._await_if_async(
            self._client.completions.create(stream=True, stream_options=options, **request)
        )
        chunks = self._await_if_async(_collect_chunks(stream)) if self._loop else list(stream)
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks[-1].usage

    def close(self) -> None:
        self._await_if_async(self._client.close())

    def _send(self, api: Any, final_method: str, request: dict[str, Any]) -> Any:
        """Send the request. ``final_method`` is the method of a stream that returns the complete response."""
        if not self._use_streaming:
            return self._await_if_async(api.create(**request))
        if self._loop:
            return self._await_if_async(_collect_final(api, final_method, request))
        with api.stream(**request) as stream:
            return getattr(stream, final_method)()

    def _await_if_async(self, result: Any) -> Any:
        return self._loop.run_until_complete(result) if self._loop else result


async def _collect_final(api: Any, final_method: str, request: dict[str, Any]) -> Any:
    async with api.stream(**request) as stream:
        return await getattr(stream, final_method)()


async def _collect_chunks(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


def converse_over_chat(client: VariantClient, job: Job, job_result: JobResult) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if "stream" in job.flags else {}
    messages: list[Any] = [{"role": "system", "content": "Be exact."}]
    for question in (job.question, job.follow_up):
        messages.append({"role": "user", "content": question})
        while True:
            tools = [{"type": "function", "function": FUNCTION}]
            completion = client.create_chat_completion(
                model="instar", messages=messages, tools=tools, **options
            )
            usage = completion.usage
            job_result.usage.append((usage.prompt_tokens, usage.completion_tokens))
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in message.tool_calls or ():
                result = calc(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                job_result.answers.append(message.content)
                break


def converse_over_responses(client: VariantClient, job: Job, job_result: JobResult) -> None:
    tools: Any = [{"type": "function", "strict": False, **FUNCTION}]
    request: dict[str, Any] = {"model": "instar", "instructions": "Be exact.", "tools": tools}
    items: list[Any] = []
    for question in (job.question, job.follow_up):
        items.append({"role": "user", "content": question})
        while True:
            response = client.create_response(input=items, **request)
            job_result.usage.append((response.usage.input_tokens, response.usage.output_tokens))
            if "previous" in job.flags:
                request["previous_response_id"] = response.id
                items = []
            else:
                items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            for call in calls:
                result = calc(**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
            if not calls:
                job_result.answers.append(response.output_text)
                break


def converse_over_completions(client: VariantClient, job: Job, job_result: JobResult) -> None:
    prompt = ""
    for question in (job.question, job.follow_up):
        prompt += f"Q: {question}\nA:"
        text, usage = client.create_completion(model="instar", prompt=prompt, max_tokens=200)
        job_result.usage.append((usage.prompt_tokens, usage.completion_tokens))
        job_result.answers.append(text)
        prompt += f"{text}\n"


def run(job: Job, job_result: JobResult) -> None:
    client = VariantClient(job)
    converse = {
        "chat": converse_over_chat,
        "responses": converse_over_responses,
        "completions": converse_over_completions,
    }[job.variant.partition("-")[0]]
    converse(client, job, job_result)
    client.close()


run_jobs(run)
