"""An agent that does everything agents do to a conversation, at random, and notes what it did."""

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
from tests.integration.taught import TOOLS, random_text

STOPS = (["12"], ["} }", "9"], ["answer", "é"], [" "])


@dataclass(frozen=True)
class Sent:
    """A request that was answered."""

    request_id: str
    kind: str
    """`follows`: it extends the reply to ``parent``. `fresh`: nothing recorded leads up to it."""
    parent: str | None = None


@dataclass(frozen=True)
class Turn:
    """A conversation up to a place where the model is to speak; ``parent`` answered last in it."""

    messages: list[Json]
    parent: str | None = None


@dataclass
class Rambler:
    """One session."""

    http: aiohttp.ClientSession
    session: AgentSession
    rng: random.Random
    sent: list[Sent] = field(default_factory=list[Sent])
    did: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        self.tools = [
            {"type": "function", "function": dict(tool)}
            for tool in self.rng.sample(TOOLS, self.rng.choice([0, 1, 1, 2, 3]))
        ]
        self.marks = 0

    async def run(self) -> None:
        turn = Turn(self._opening())
        moves = [self.ask, self.ask, self.ask, self.ask_for_several, self.ask_again, self.ask_twice_at_once,
                 self.lose_the_reply, self.hang_up, self.fork]  # fmt: skip
        for _ in range(self.rng.randint(1, 5)):
            if self.rng.random() < 0.15 and turn.parent:
                turn = self._rewritten(turn)
            elif self.rng.random() < 0.05 and turn.parent:
                await self.ask(Turn(self._opening()))
                self.did["sub-agent"] += 1
            move = self.rng.choice(moves)
            self.did[move.__name__] += 1
            turn = self._continued(turn, await move(turn))

    # --- ways to ask: each returns the wire message to go on with, and the request it came from --------

    async def ask(self, turn: Turn, **options: Any) -> tuple[Json, str]:
        request_id, (message, *_) = await self._post(turn, **options)
        return message, request_id

    async def ask_for_several(self, turn: Turn) -> tuple[Json, str]:
        request_id, messages = await self._post(turn, n=self.rng.randint(2, 3))
        return self.rng.choice(messages), request_id

    async def ask_again(self, turn: Turn) -> tuple[Json, str]:
        """Another reply to the same: the first one did not please."""
        first = await self.ask(turn)
        return self.rng.choice([first, await self.ask(turn)])

    async def ask_twice_at_once(self, turn: Turn) -> tuple[Json, str]:
        return self.rng.choice(await asyncio.gather(self.ask(turn), self.ask(turn)))

    async def lose_the_reply(self, turn: Turn) -> tuple[Json, str]:
        """As an SDK does that retries: the recorded reply is played, and nothing is sampled."""
        message, request_id = await self.ask(turn)
        replayed, same_id = await self.ask(turn, retried=True)
        assert same_id == request_id
        assert (replayed["content"] or "") == (message["content"] or "")
        self.sent.pop()
        return replayed, request_id

    async def hang_up(self, turn: Turn) -> tuple[Json, str]:
        """Go away while the reply is coming, then ask again."""
        # The seed that the session would give is free again when a request came to nothing.
        body = self._body(turn, stream=True, max_tokens=64) | {"seed": self.rng.getrandbits(62)}
        async with self._request(body) as response:
            await response.content.readany()
        return await self.ask(turn)

    async def fork(self, turn: Turn) -> tuple[Json, str]:
        """Two different questions behind the same reply, at once."""
        message, request_id = await self.ask(turn)
        ways = [self._continued(turn, (message, request_id)) for _ in range(2)]
        await asyncio.gather(*map(self.ask, ways))
        return message, request_id

    # --- the conversation --------------------------------------------------------------------------

    def _opening(self) -> list[Json]:
        messages = [self._user()]
        if self.rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": random_text(self.rng)})
        return messages

    def _user(self) -> Json:
        """No two are the same, so that each turn is known by its messages."""
        self.marks += 1
        return {"role": "user", "content": f"{random_text(self.rng)}#{self.marks}"}

    def _continued(self, turn: Turn, answered: tuple[Json, str]) -> Turn:
        reply, request_id = answered
        new: list[Json] = []
        for call in reply.get("tool_calls", ()):
            self.did["tool call"] += 1
            self.marks += 1
            content = f"{random_text(self.rng, 3)}#{self.marks}"
            new.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        if not new or self.rng.random() < 0.2:
            new.append(self._user())
        return Turn([*turn.messages, self._echoed(reply), *new], request_id)

    def _echoed(self, reply: Json) -> Json:
        """The reply as agents send it back: whole, or changed in ways that say the same."""
        match self.rng.randrange(3):
            case 0:
                return {key: value for key, value in reply.items() if value is not None}
            case 1:
                return {**reply, "content": (reply["content"] or "").strip(), "refusal": None}
            case _:
                calls: Sequence[Any] = reply.get("tool_calls", ())
                return {**reply, "tool_calls": [_respaced(call) for call in calls]} if calls else reply

    def _rewritten(self, turn: Turn) -> Turn:
        """History as it was not: an earlier reply changed, or all of it summed up in one message."""
        if self.rng.random() < 0.5:
            self.did["compacted"] += 1
            return Turn([{"role": "user", "content": "So far: " + random_text(self.rng)}, self._user()])
        self.did["tampered"] += 1
        messages = list(turn.messages)
        at = self.rng.choice([i for i, message in enumerate(messages) if message["role"] == "assistant"])
        messages[at] = {**messages[at], "content": f"{messages[at].get('content') or ''} (edited)"}
        return Turn(messages)

    # --- the wire ----------------------------------------------------------------------------------

    def _body(self, turn: Turn, **options: Any) -> Json:
        body: Json = {
            "model": "m",
            "messages": turn.messages,
            "max_tokens": self.rng.choice([1, 2, 5, 16, 48, 64]),
            "stream": self.rng.random() < 0.5,
            **options,
        }
        if self.rng.random() < 0.7:
            body["seed"] = self.rng.getrandbits(62)
        if self.rng.random() < 0.25:
            body["stop"] = self.rng.choice(STOPS)
        if self.tools:
            body["tools"] = self.tools
        return body

    def _request(self, body: Json, retried: bool = False) -> Any:
        headers = {"Authorization": f"Bearer {self.session.api_key}"}
        if retried:
            headers["x-stainless-retry-count"] = "1"
        return self.http.post(f"{self.session.base_url}/chat/completions", json=body, headers=headers)

    async def _post(self, turn: Turn, *, retried: bool = False, **options: Any) -> tuple[str, list[Json]]:
        body = self._body(turn, **options)
        async with self._request(body, retried) as response:
            text = (await response.read()).decode()
            assert response.status == 200, text
        request_id, messages, reasons = (_from_events if body["stream"] else _from_json)(text)
        self.did.update(f"finish {reason}" for reason in reasons)
        self.sent.append(Sent(request_id, "follows" if turn.parent else "fresh", turn.parent))
        return request_id, messages


def _respaced(call: Json) -> Json:
    """A tool call whose arguments went through a JSON library. Those of a malformed one cannot."""
    function = call["function"]
    try:
        arguments = json.dumps(json.loads(function["arguments"]), indent=1)
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _from_json(text: str) -> tuple[str, list[Json], list[str]]:
    answer = json.loads(text)
    choices = answer["choices"]
    return answer["id"], [c["message"] for c in choices], [c["finish_reason"] for c in choices]


def _from_events(text: str) -> tuple[str, list[Json], list[str]]:
    """Put a streamed answer together, as a client does."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    messages: dict[int, Json] = {}
    reasons: list[str] = []
    chunks = [json.loads(event) for event in events]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        message = messages.setdefault(choice["index"], {"role": "assistant", "content": ""})
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        for piece in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if piece["index"] == len(calls):
                calls.append({"id": piece["id"], "type": "function", "function": {**piece["function"]}})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        if choice["finish_reason"]:
            reasons.append(choice["finish_reason"])
    return chunks[0]["id"], [messages[index] for index in sorted(messages)], reasons
