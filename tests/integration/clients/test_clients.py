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
from tests.integration.clients.accounts import (
    Recorded,
    asking,
    continued,
    is_exact,
    recorded,
    sampled_tokens,
    trained_tokens,
    usage_of,
)
from tests.integration.clients.environment import Job, run_client
from tests.integration.clients.roster import CALLS, CLIENTS, Client, expected
from tests.integration.clients.script import MALFORMED, THANKS, WELCOME, question
from tests.serving import ADMIN_KEY, running_gateway

pytestmark = pytest.mark.timeout(600)  # the clients may have to be installed first
RUN = "clients"


MALFORMING = {
    "openai": ["chat", "chat-stream", "responses", "responses-stream"],
    "anthropic": ["messages", "messages-stream"],
    "openai_agents": ["chat-stream", "responses"],
    "pydantic_ai": ["chat", "messages-stream"],
    "langgraph": ["chat-stream", "messages"],
}


@dataclass
class House:
    """A gateway in front of a scripted engine, and its store."""

    url: str
    store: SqliteStore
    home: Path
    decode: Callable[[list[int]], str]
    _keys: dict[str, str] = field(default_factory=dict[str, str])

    async def opened(self, way: str, asked: str) -> Job:
        """In a session that was opened for it."""
        client = GatewayClient(self.url, ADMIN_KEY)
        session = await client.open_session(channel=Channel.TRAIN)
        await client.close()
        return Job(session.base_url.removesuffix("/v1"), session.api_key, way, asked, THANKS)

    async def live(self, way: str, asked: str, agent: str) -> Job:
        """With an agent's key: which calls belong together, the gateway has to find out."""
        if agent not in self._keys:
            self._keys[agent] = await create_key(self.store, "agent", agent, agent)
        return Job(self.url, self._keys[agent], way, asked, THANKS)

    async def converse(
        self, name: str, ways: Mapping[str, str], jobs: Sequence[Job]
    ) -> dict[str, Counter[tuple[int, int]]]:
        """Run them all at once; each is answered. By question, the usage that the client was told."""
        told: dict[str, Counter[tuple[int, int]]] = {}
        for job, outcome in zip(jobs, await run_client(name, jobs, self.home), strict=True):
            assert not outcome.error, f"{job.way}: {outcome.error}"
            assert outcome.said == expected(number_of(job), ways[job.way]), job.way
            told.setdefault(job.question, Counter()).update(outcome.usage)
        return told


def number_of(job: Job) -> int:
    return int(job.question.split()[2])


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    model = ModelConfig(name=str(resolve_model(DEFAULT_MODEL)), max_context=200_000)
    script = ScriptedEngineConfig(function="tests.integration.clients.script:smollm2")
    engine, store = ScriptedEngine(model, script), SqliteStore(tmp_path / "store.db")
    decode = load_tokenizer(Path(model.name)).decode
    async with running_gateway(RunConfig(name=RUN, model=model), store, engine) as url:
        yield House(url, store, tmp_path, decode)
    await engine.close()
    await store.close()


def check_exact(found: Recorded, *, rewrites: bool) -> None:
    """Every call that goes on from another begins with its tokens, and all that was sampled is trained."""
    assert all(call.status is CallStatus.OK and call.trainable for call in found.calls)
    extending = 0
    for i, call in enumerate(found.calls):
        if call.dialect == "completions":
            parent = found.calls[i - 1] if i else None
        else:
            parent = continued(call, found.calls[:i])
        if parent is not None:
            assert is_exact(call, parent), (call.link, call.messages)
            extending += 1
    handed_over = found.calls[0].tools != found.calls[-1].tools
    assert extending == (0 if rewrites else len(found.calls) - 1 - handed_over)
    assert trained_tokens(found) == sampled_tokens(found.calls)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: f"{client.name}-{next(iter(client.ways))}")
async def test_a_client_works_and_is_recorded_exactly(house: House, client: Client) -> None:
    """Each way four times at once: in two opened sessions and as two live agents, all with the same words.
    One live agent has as many conversations as there are ways."""
    ways = dict(enumerate(client.ways.items(), start=20))
    jobs: list[Job] = []
    for number, (way, how) in ways.items():
        asked = question(number, how)
        jobs += [await house.opened(way, asked), await house.opened(way, asked)]
        jobs += [await house.live(way, asked, "one"), await house.live(way, asked, "two")]
    told = await house.converse(client.name, client.ways, jobs)
    found = await recorded(house.store, RUN)
    for number, (way, how) in ways.items():
        own = asking(found, question(number, how), house.decode)
        assert [len(one.calls) for one in own] == [CALLS.get(how, 4)] * 4, way
        whose = Counter(one.session.agent_id for one in own if one.session.channel is Channel.LIVE)
        assert whose == Counter(["one", "two"])
        for one in own:
            check_exact(one, rewrites=client.rewrites)
        assert not (usage := told[question(number, how)]) or usage == usage_of(
            call for one in own for call in one.calls
        ), way


@pytest.mark.parametrize("name", MALFORMING)
async def test_a_malformed_call_is_plain_text(house: House, name: str) -> None:
    ways = dict.fromkeys(MALFORMING[name], "badly")
    jobs = [await house.opened(way, question(20 + i, "badly")) for i, way in enumerate(ways)]
    await house.converse(name, ways, jobs)
    for found in await recorded(house.store, RUN):
        assert [call.reply["content"] for call in found.calls] == [MALFORMED, WELCOME]
        check_exact(found, rewrites=False)
