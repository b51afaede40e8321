"""SDKs and agent frameworks of PyPI, as they are, at a live gateway: the question is answered, and every call
is recorded where it belongs, token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from instar.config import ModelConfig, RunConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.gateway.auth import create_key
from instar.models import DEFAULT_MODEL, load_tokenizer, resolve_model
from instar.rollout.gateway_client import GatewayClient
from instar.store.sqlite import SqliteStore
from instar.types import CallStatus, Channel
from tests.integration.clients.environment import ClientJob, run_client
from tests.integration.clients.recorded_sessions import (
    RecordedSession,
    count_sampled_tokens,
    count_trained_tokens,
    count_usage,
    find_continued_call,
    is_exact,
    load_recorded_sessions,
    select_calls_with_question,
)
from tests.integration.clients.script import MALFORMED, THANKS, WELCOME, make_question
from tests.integration.clients.supported_clients import CALL_COUNTS, CLIENTS, Client, expected_answers
from tests.serving import ADMIN_KEY, running_gateway

pytestmark = pytest.mark.timeout(600)  # the clients may have to be installed first
RUN = "clients"


MALFORMED_CALL_VARIANTS = {
    "openai": ["chat", "chat-stream", "responses", "responses-stream"],
    "anthropic": ["messages", "messages-stream"],
    "openai_agents": ["chat-stream", "responses"],
    "pydantic_ai": ["chat", "messages-stream"],
    "langgraph": ["chat-stream", "messages"],
}


@dataclass
class ClientHarness:
    """A gateway in front of a scripted engine, and its store."""

    url: str
    store: SqliteStore
    home: Path
    decode: Callable[[list[int]], str]
    _keys: dict[str, str] = field(default_factory=dict[str, str])

    async def make_session_job(self, way: str, asked: str) -> ClientJob:
        """In a session that was opened for it."""
        client = GatewayClient(self.url, ADMIN_KEY)
        session = await client.open_session(channel=Channel.TRAIN)
        await client.close()
        return ClientJob(session.base_url.removesuffix("/v1"), session.api_key, way, asked, THANKS)

    async def make_live_job(self, way: str, asked: str, agent: str) -> ClientJob:
        """With an agent's key: which calls belong together, the gateway has to find out."""
        if agent not in self._keys:
            self._keys[agent] = await create_key(self.store, "agent", agent, agent)
        return ClientJob(self.url, self._keys[agent], way, asked, THANKS)

    async def converse(
        self, name: str, ways: Mapping[str, str], jobs: Sequence[ClientJob]
    ) -> dict[str, Counter[tuple[int, int]]]:
        """Run them all at once; each is answered. By question, the usage that the client was told."""
        told: dict[str, Counter[tuple[int, int]]] = {}
        for job, outcome in zip(jobs, await run_client(name, jobs, self.home), strict=True):
            assert not outcome.error, f"{job.variant}: {outcome.error}"
            assert outcome.answers == expected_answers(parse_number(job), ways[job.variant]), job.variant
            told.setdefault(job.question, Counter()).update(outcome.usage)
        return told


def parse_number(job: ClientJob) -> int:
    return int(job.question.split()[2])


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[ClientHarness]:
    model = ModelConfig(name=str(resolve_model(DEFAULT_MODEL)), max_context=200_000)
    script = ScriptedEngineConfig(function="tests.integration.clients.script:smollm2")
    engine, store = ScriptedEngine(model, script), SqliteStore(tmp_path / "store.db")
    decode = load_tokenizer(Path(model.name)).decode
    async with running_gateway(RunConfig(name=RUN, model=model), store, engine) as url:
        yield ClientHarness(url, store, tmp_path, decode)
    await engine.close()
    await store.close()


def check_exact(found: RecordedSession, *, rewrites: bool) -> None:
    """Every call that goes on from another begins with its tokens, and all that was sampled is trained."""
    assert all(call.status is CallStatus.OK and call.trainable for call in found.calls)
    extending = 0
    for i, call in enumerate(found.calls):
        if call.dialect == "completions":
            parent = found.calls[i - 1] if i else None
        else:
            parent = find_continued_call(call, found.calls[:i])
        if parent is not None:
            assert is_exact(call, parent), (call.link, call.messages)
            extending += 1
    handed_over = found.calls[0].tools != found.calls[-1].tools
    assert extending == (0 if rewrites else len(found.calls) - 1 - handed_over)
    assert count_trained_tokens(found) == count_sampled_tokens(found.calls)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: f"{client.name}-{next(iter(client.variants))}")
async def test_a_client_works_and_is_recorded_exactly(house: ClientHarness, client: Client) -> None:
    """Each way four times at once: in two opened sessions and as two live agents, all with the same words.
    One live agent has as many conversations as there are ways."""
    ways = dict(enumerate(client.variants.items(), start=20))
    jobs: list[ClientJob] = []
    for number, (way, how) in ways.items():
        asked = make_question(number, how)
        jobs += [await house.make_session_job(way, asked), await house.make_session_job(way, asked)]
        jobs += [await house.make_live_job(way, asked, "one"), await house.make_live_job(way, asked, "two")]
    told = await house.converse(client.name, client.variants, jobs)
    found = await load_recorded_sessions(house.store, RUN)
    for number, (way, how) in ways.items():
        own = select_calls_with_question(found, make_question(number, how), house.decode)
        assert [len(one.calls) for one in own] == [CALL_COUNTS.get(how, 4)] * 4, way
        whose = Counter(one.session.agent_id for one in own if one.session.channel is Channel.LIVE)
        assert whose == Counter(["one", "two"])
        for one in own:
            check_exact(one, rewrites=client.rewrites_replies)
        assert not (usage := told[make_question(number, how)]) or usage == count_usage(
            call for one in own for call in one.calls
        ), way


@pytest.mark.parametrize("name", MALFORMED_CALL_VARIANTS)
async def test_a_malformed_call_is_plain_text(house: ClientHarness, name: str) -> None:
    ways = dict.fromkeys(MALFORMED_CALL_VARIANTS[name], "badly")
    jobs = [await house.make_session_job(way, make_question(20 + i, "badly")) for i, way in enumerate(ways)]
    await house.converse(name, ways, jobs)
    for found in await load_recorded_sessions(house.store, RUN):
        assert [call.reply["content"] for call in found.calls] == [MALFORMED, WELCOME]
        check_exact(found, rewrites=False)
