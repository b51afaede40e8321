"""Replay recorded traffic from real agents through the dialects and the message graph, and over HTTP.

`LINKS` has the expected link of each call in a scenario: ``root``, ``branch``, the index of the call that it
extends, ``=n`` for a sibling of call n, or ``failed``.
"""

from __future__ import annotations

import gzip
import json
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from instar.config import GatewayConfig, ModelConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.errors import EngineUnavailable
from instar.gateway.dialects.base import Dialect
from instar.gateway.pipeline.parse import parse_external_id
from instar.record.base import Placement
from instar.record.graph import MessageGraph
from instar.record.hashing import HashChain, MessageHasher, normalize_call_id
from instar.record.render import TemplateRenderer
from instar.record.tool_calls import format_call
from instar.registry import list_names, resolve
from instar.types import Call, CallStatus, Json, Link, Message, new_id
from tests.tiny import make_tiny_tokenizer
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, run_gateway
from tests.unit.record.test_graph import to_delta

TRAFFIC_FOLDER = Path(__file__).parent / "fixtures" / "traffic"
HASHER = MessageHasher(b"key")
LINKS = {
    # The request for the summary continues the first reply and leaves out the second.
    "claude-code-compaction": "root 0 0 branch 3 4",
    "claude-code-edit": "root 0 1",
    "claude-code-retry": "root failed 0 2",
    "claude-code-subagents": "root branch branch 2 1 0 5 6",
    # The agent requests the summary without tools, so its prompt has no common prefix.
    "codex-compaction": "root 0 branch branch 3 4",
    "codex-edit": "root 0 1",
    "codex-retry": "root failed 0 2",
    "codex-subagents": "root branch 0 branch 3 1 2 6 7",
    "openclaw-edit": "root 0 1",
    "openclaw-retry": "root failed 0 2",
    "openclaw-rewriting": "root branch branch",
    # OpenCode first requests a title.
    "opencode-compaction": "root branch 1 branch branch 4 5",
    "opencode-edit": "root branch 1 2",
    "opencode-retry": "root branch failed 1 3",
    "opencode-subagents": "root branch root root 2 3 1 6 7",
    # After the first call with a summary, Qwen Code inserts its reminders before the summary.
    "qwen-code-compaction": "root 0 branch branch branch 4",
    "qwen-code-edit": "root 0 1",
    "qwen-code-retry": "root failed 0 2",
    "qwen-code-subagents": "root 0 branch branch 1 2 3 4 7",
}
SESSION_COUNTS = {
    # Scenarios with several sessions: some sub-agents send their own session id, and some send none.
    "opencode-subagents": 3,
    "qwen-code-subagents": 3,
}
DIALECTS: dict[str, Dialect] = {
    f"/v1{dialect.path}": dialect
    for dialect in (resolve("dialects", name)() for name in list_names("dialects"))
}


@dataclass
class RecordedRequest:
    path: str
    headers: dict[str, str]
    body: Json
    reply: Json

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.path.partition("?")[0]]

    def parse_reply(self) -> Message:
        """Return the reply, parsed from the format in which the agent sends it back."""
        reply = self.reply
        match self.dialect.name:
            case "chat":
                turn: Json = {"messages": [reply["choices"][0]["message"]]}
            case "messages":
                turn = {"messages": [{"role": "assistant", "content": reply["content"]}], "max_tokens": 1}
            case _:
                turn = {"input": reply["output"]}
        return self.dialect.parse_request(json.dumps({"model": "m", **turn}).encode()).messages[-1]


def load_requests(scenario: str) -> list[RecordedRequest]:
    rows = json.loads(gzip.decompress((TRAFFIC_FOLDER / f"{scenario}.json.gz").read_bytes()))
    return [RecordedRequest(row["path"], row["headers"], row["body"], row["reply"]) for row in rows]


def list_scenarios() -> list[str]:
    return sorted(file.name.removesuffix(".json.gz") for file in TRAFFIC_FOLDER.glob("*-*.json.gz"))


def format_reply(message: Message) -> str:
    """Return the text that a model would sample for this reply."""
    parts = [message["content"]] if message["content"] else []
    return "\n".join([*parts, *map(format_call, message.get("tool_calls", ()))])


@dataclass
class Replay:
    """Replays recorded traffic without a gateway, with one graph per session."""

    renderer: TemplateRenderer
    restarted: bool = False
    """Restore the graph before every call, as after a restart."""
    graphs: dict[str | None, MessageGraph] = field(default_factory=dict[str | None, MessageGraph])
    session_calls: dict[str | None, list[Call]] = field(default_factory=dict[str | None, list[Call]])
    calls: dict[str, Call] = field(default_factory=dict[str, Call])
    call_indexes: dict[str, int] = field(default_factory=dict[str, int])

    def run(self, scenario: str) -> list[str]:
        return [self.replay_request(index, request) for index, request in enumerate(load_requests(scenario))]

    def replay_request(self, index: int, recorded: RecordedRequest) -> str:
        request = recorded.dialect.parse_request(json.dumps(recorded.body).encode())
        headers = {name.lower(): value for name, value in recorded.headers.items()}
        session_id = parse_external_id(headers, request.session_hints)
        graph = self.graphs.setdefault(session_id, MessageGraph(HASHER))
        if self.restarted:
            graph = MessageGraph(HASHER, [to_delta(call) for call in self.session_calls.get(session_id, ())])
        chain = graph.match_replies(HASHER.hash_messages(request.messages, request.tools), request.messages)
        placement = graph.place(chain, request.messages, request.tools, self.renderer)
        graph.release(placement)
        if "error" in recorded.reply:
            return "failed"
        reply = recorded.parse_reply()
        reply_chain = chain.extend([HASHER.hash_message(reply)])
        call = self.make_call(placement, reply_chain, request.messages, reply)
        graph.add(call, placement, reply_chain)
        self.session_calls.setdefault(session_id, []).append(call)
        self.calls[call.call_id], self.call_indexes[call.call_id] = call, index
        return self.check_link(call)

    def make_call(
        self, placement: Placement, reply_chain: HashChain, messages: Sequence[Message], reply: Message
    ) -> Call:
        sampled = [*self.renderer.encode(format_reply(reply)), self.renderer.stop_token_ids[0]]
        return Call(
            call_id=new_id("call"),
            session_id="s",
            run_id="r",
            agent_id="a",
            policy_id="p",
            request_id=new_id("req"),
            prompt_ids=placement.prompt_ids,
            sampled_ids=np.asarray(sampled, np.int32),
            logprobs=np.zeros(len(sampled), np.float32),
            versions=np.zeros(len(sampled), np.int32),
            messages=tuple(messages),
            reply=reply,
            finish_reason="stop",
            parent_id=placement.parent_id,
            link=placement.link,
            base_id=placement.base_id,
            base_tokens=placement.base_tokens,
            base_messages=placement.base_messages,
            status=CallStatus.OK,
            digests=reply_chain.pack(placement.base_messages),
        )

    def check_link(self, call: Call) -> str:
        """Check the call's tokens and return its link in the notation of `LINKS`."""
        base = self.calls.get(call.base_id or "")
        if base is not None:
            assert np.array_equal(base.sequence[: call.base_tokens], call.prompt_ids[: call.base_tokens])
            base_messages = [*base.messages, base.reply][: call.base_messages]
            assert base_messages == list(call.messages[: call.base_messages])
        if call.link is Link.EXTENDS:
            parent = self.calls[call.parent_id or ""]
            assert np.array_equal(call.prompt_ids[: len(parent.sequence)], parent.sequence)
            return str(self.call_indexes[parent.call_id])
        if call.link is Link.SIBLING:
            assert base is not None
            return f"={self.call_indexes[base.call_id]}"
        return call.link.value


def test_traffic_fixtures_cover_every_scenario() -> None:
    assert list_scenarios() == sorted(LINKS)


@pytest.mark.parametrize("scenario", LINKS)
@pytest.mark.parametrize("restarted", [False, True])
def test_traffic_placements_have_the_expected_links(
    tiny_renderer: TemplateRenderer, scenario: str, restarted: bool
) -> None:
    assert " ".join(Replay(tiny_renderer, restarted).run(scenario)) == LINKS[scenario]


# --- over HTTP ----------------------------------------------------------------------------------

NEXT_REPLIES: deque[str | None] = deque()
"""The engine's next replies. None makes the engine unavailable."""


def get_next_reply(prompt: str, seed: int | None) -> str:
    if (reply := NEXT_REPLIES.popleft()) is None:
        raise EngineUnavailable("the engine is restarting")
    return reply


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_folder = tmp_path_factory.mktemp("model")
    make_tiny_tokenizer().save_pretrained(model_folder)
    LlamaConfig().save_pretrained(model_folder)
    return model_folder


@pytest.fixture
async def gateway(
    model_folder: Path, tmp_path: Path, tiny_renderer: TemplateRenderer
) -> AsyncGenerator[RunningGateway]:
    NEXT_REPLIES.clear()
    engine = ScriptedEngine(
        ModelConfig(name=str(model_folder), max_context=200_000),
        ScriptedEngineConfig(function=f"{__name__}:get_next_reply"),
    )
    async with run_gateway(tmp_path / "store.db", engine, tiny_renderer, GatewayConfig()) as gateway:
        yield gateway


@dataclass
class Agent:
    """Sends an agent's recorded requests, with the tool call ids of the current replies."""

    gateway: RunningGateway
    call_ids: dict[str, str] = field(default_factory=dict[str, str])
    """The current tool call ids by recorded id."""

    async def send(self, request: RecordedRequest) -> str | None:
        """Send the request and return the session id, or None if the engine is unavailable."""
        NEXT_REPLIES.append(None if "error" in request.reply else format_reply(request.parse_reply()))
        body = {**request.body, "stream": False}
        body.pop("stream_options", None)
        text = json.dumps(body)
        for recorded_id, current_id in self.call_ids.items():
            text = text.replace(recorded_id, current_id)
        headers = {
            **request.headers,
            "Authorization": f"Bearer {ADMIN_KEY}",
            "Content-Type": "application/json",
        }
        path = request.path.partition("?")[0]
        response = await self.gateway.http.post(path, content=text.encode(), headers=headers)
        if "error" in request.reply:
            assert response.status_code == 503
            return None
        assert response.status_code == 200, response.text
        reply = RecordedRequest(request.path, {}, {}, response.json()).parse_reply()
        calls = zip(request.parse_reply().get("tool_calls", ()), reply.get("tool_calls", ()), strict=True)
        for recorded_call, current_call in calls:
            recorded_id, current_id = recorded_call["id"], current_call["id"]
            self.call_ids[recorded_id] = current_id
            self.call_ids[normalize_call_id(recorded_id)] = normalize_call_id(current_id)
        return response.headers["x-instar-session"]


@pytest.mark.parametrize("scenario", LINKS)
async def test_traffic_over_http_is_recorded_as_expected(
    gateway: RunningGateway, tiny_renderer: TemplateRenderer, scenario: str
) -> None:
    agent = Agent(gateway)
    sessions = [session for request in load_requests(scenario) if (session := await agent.send(request))]
    assert len(set(sessions)) == SESSION_COUNTS.get(scenario, 1)
    assert {row.session.session_id for row in await gateway.store.sessions("run")} == set(sessions)
    calls = {session: deque(await gateway.store.calls(session)) for session in sessions}
    replay = Replay(tiny_renderer)
    links: list[str] = []
    expected = LINKS[scenario].split()
    for index, link in enumerate(expected):
        if link == "failed":
            continue
        session = sessions[len(links)]
        call = calls[session].popleft()
        is_first = session not in sessions[: len(links)]
        replay.calls[call.call_id], replay.call_indexes[call.call_id] = call, index
        links.append(replay.check_link(call))
        assert links[-1] == ("root" if is_first else link), index
        assert call.trainable
    assert not any(calls.values())
