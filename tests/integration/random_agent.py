"""An agent that performs random actions on its conversations and records its requests."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from instar.rollout.base import AgentSession
from instar.types import Json
from tests.integration.tool_call_model import TOOLS, make_random_text

STOP_SEQUENCES = (["12"], ["} }", "9"], ["answer", "é"], [" "])


@dataclass(frozen=True)
class SentRequest:
    """A request to which the gateway has responded."""

    request_id: str
    kind: str
    """`follows` if the request extends the reply to ``parent``, `fresh` if it extends no recorded call."""
    parent: str | None = None
    """The id of the request whose reply was extended."""


@dataclass(frozen=True)
class Conversation:
    """A conversation that the agent can continue."""

    messages: list[Json]
    """The messages to send with the next request."""
    parent: str | None = None
    """The id of the request that returned the latest reply, or None if the history is new or rewritten."""


@dataclass
class RandomAgent:
    """Takes random actions in one session: requests, retries, disconnects, forks and edits of its history."""

    http: aiohttp.ClientSession
    session: AgentSession
    rng: random.Random
    requests: list[SentRequest] = field(default_factory=list[SentRequest])
    event_counts: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        self.tools = [
            {"type": "function", "function": dict(tool)}
            for tool in self.rng.sample(TOOLS, self.rng.choice([0, 1, 1, 2, 3]))
        ]
        self.message_count = 0

    async def run(self) -> None:
        conversation = Conversation(self._first_messages())
        actions = [
            self.request_reply,
            self.request_reply,
            self.request_reply,
            self.request_several_choices,
            self.repeat_request,
            self.repeat_request_concurrently,
            self.retry_lost_reply,
            self.disconnect_mid_stream,
            self.fork_conversation,
        ]
        for _ in range(self.rng.randint(1, 5)):
            if self.rng.random() < 0.15 and conversation.parent:
                conversation = self._rewrite_history(conversation)
            elif self.rng.random() < 0.05 and conversation.parent:
                await self.request_reply(Conversation(self._first_messages()))
                self.event_counts["sub-agent"] += 1
            action = self.rng.choice(actions)
            self.event_counts[action.__name__] += 1
            conversation = self._continue_conversation(conversation, await action(conversation))

    # --- actions: each returns the reply to continue with and the id of its request --------------------

    async def request_reply(self, conversation: Conversation, **options: Any) -> tuple[Json, str]:
        request_id, (message, *_) = await self._post(conversation, **options)
        return message, request_id

    async def request_several_choices(self, conversation: Conversation) -> tuple[Json, str]:
        request_id, messages = await self._post(conversation, n=self.rng.randint(2, 3))
        return self.rng.choice(messages), request_id

    async def repeat_request(self, conversation: Conversation) -> tuple[Json, str]:
        """Request two replies to the same messages, like an agent that rejects the first one."""
        first_reply = await self.request_reply(conversation)
        return self.rng.choice([first_reply, await self.request_reply(conversation)])

    async def repeat_request_concurrently(self, conversation: Conversation) -> tuple[Json, str]:
        return self.rng.choice(
            await asyncio.gather(self.request_reply(conversation), self.request_reply(conversation))
        )

    async def retry_lost_reply(self, conversation: Conversation) -> tuple[Json, str]:
        """Repeat a request with the retry header of an SDK. The gateway must replay the recorded reply."""
        message, request_id = await self.request_reply(conversation)
        replayed, replayed_id = await self.request_reply(conversation, retried=True)
        assert replayed_id == request_id
        assert (replayed["content"] or "") == (message["content"] or "")
        self.requests.pop()
        return replayed, request_id

    async def disconnect_mid_stream(self, conversation: Conversation) -> tuple[Json, str]:
        """Disconnect while the reply is streaming, then send the request again."""
        # Send an explicit seed: the session would use the abandoned request's seed again for the next one.
        body = self._make_body(conversation, stream=True, max_tokens=64) | {"seed": self.rng.getrandbits(62)}
        async with self._send_body(body) as response:
            await response.content.readany()
        return await self.request_reply(conversation)

    async def fork_conversation(self, conversation: Conversation) -> tuple[Json, str]:
        """Continue the same reply with two different messages concurrently."""
        message, request_id = await self.request_reply(conversation)
        continuations = [self._continue_conversation(conversation, (message, request_id)) for _ in range(2)]
        await asyncio.gather(*map(self.request_reply, continuations))
        return message, request_id

    # --- the conversation --------------------------------------------------------------------------

    def _first_messages(self) -> list[Json]:
        messages = [self._next_user_message()]
        if self.rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": make_random_text(self.rng)})
        return messages

    def _next_user_message(self) -> Json:
        """Return a message with a unique number, so that no two conversations have the same messages."""
        self.message_count += 1
        return {"role": "user", "content": f"{make_random_text(self.rng)}#{self.message_count}"}

    def _continue_conversation(
        self, conversation: Conversation, latest_reply: tuple[Json, str]
    ) -> Conversation:
        reply, request_id = latest_reply
        new_messages: list[Json] = []
        for call in reply.get("tool_calls", ()):
            self.event_counts["tool call"] += 1
            self.message_count += 1
            content = f"{make_random_text(self.rng, 3)}#{self.message_count}"
            new_messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        if not new_messages or self.rng.random() < 0.2:
            new_messages.append(self._next_user_message())
        return Conversation([*conversation.messages, self._echo_reply(reply), *new_messages], request_id)

    def _echo_reply(self, reply: Json) -> Json:
        """Return the reply as an agent might echo it: reformatted, but with the same meaning."""
        match self.rng.randrange(3):
            case 0:
                return {key: value for key, value in reply.items() if value is not None}
            case 1:
                return {**reply, "content": (reply["content"] or "").strip(), "refusal": None}
            case _:
                calls: Sequence[Any] = reply.get("tool_calls", ())
                return (
                    {**reply, "tool_calls": [_reformat_arguments(call) for call in calls]} if calls else reply
                )

    def _rewrite_history(self, conversation: Conversation) -> Conversation:
        """Return the conversation with an earlier reply edited, or with its history replaced by a summary."""
        if self.rng.random() < 0.5:
            self.event_counts["compacted"] += 1
            return Conversation(
                [
                    {"role": "user", "content": "So far: " + make_random_text(self.rng)},
                    self._next_user_message(),
                ]
            )
        self.event_counts["tampered"] += 1
        messages = list(conversation.messages)
        index = self.rng.choice([i for i, message in enumerate(messages) if message["role"] == "assistant"])
        messages[index] = {**messages[index], "content": f"{messages[index].get('content') or ''} (edited)"}
        return Conversation(messages)

    # --- HTTP --------------------------------------------------------------------------------------

    def _make_body(self, conversation: Conversation, **options: Any) -> Json:
        body: Json = {
            "model": "m",
            "messages": conversation.messages,
            "max_tokens": self.rng.choice([1, 2, 5, 16, 48, 64]),
            "stream": self.rng.random() < 0.5,
            **options,
        }
        if self.rng.random() < 0.7:
            body["seed"] = self.rng.getrandbits(62)
        if self.rng.random() < 0.25:
            body["stop"] = self.rng.choice(STOP_SEQUENCES)
        if self.tools:
            body["tools"] = self.tools
        return body

    def _send_body(self, body: Json, retried: bool = False) -> Any:
        headers = {"Authorization": f"Bearer {self.session.api_key}"}
        if retried:
            headers["x-stainless-retry-count"] = "1"
        return self.http.post(f"{self.session.base_url}/chat/completions", json=body, headers=headers)

    async def _post(
        self, conversation: Conversation, *, retried: bool = False, **options: Any
    ) -> tuple[str, list[Json]]:
        body = self._make_body(conversation, **options)
        async with self._send_body(body, retried) as response:
            text = (await response.read()).decode()
            assert response.status == 200, text
        request_id, messages, reasons = (_parse_stream if body["stream"] else _parse_json)(text)
        self.event_counts.update(f"finish {reason}" for reason in reasons)
        self.requests.append(
            SentRequest(request_id, "follows" if conversation.parent else "fresh", conversation.parent)
        )
        return request_id, messages


def _reformat_arguments(call: Json) -> Json:
    """Return the tool call with its arguments reserialized as JSON. Malformed arguments stay unchanged."""
    function = call["function"]
    try:
        arguments = json.dumps(json.loads(function["arguments"]), indent=1)
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_json(text: str) -> tuple[str, list[Json], list[str]]:
    response = json.loads(text)
    choices = response["choices"]
    return response["id"], [c["message"] for c in choices], [c["finish_reason"] for c in choices]


def _parse_stream(text: str) -> tuple[str, list[Json], list[str]]:
    """Assemble the messages of a streamed response, as a client does."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    messages: dict[int, Json] = {}
    reasons: list[str] = []
    chunks = [json.loads(event) for event in events]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        message = messages.setdefault(choice["index"], {"role": "assistant", "content": ""})
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        for call_delta in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call_delta["index"] == len(calls):
                calls.append(
                    {"id": call_delta["id"], "type": "function", "function": {**call_delta["function"]}}
                )
            else:
                calls[call_delta["index"]]["function"]["arguments"] += call_delta["function"]["arguments"]
        if choice["finish_reason"]:
            reasons.append(choice["finish_reason"])
    return chunks[0]["id"], [messages[index] for index in sorted(messages)], reasons
