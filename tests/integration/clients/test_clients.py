"""Tests for conversations between unmodified PyPI SDKs or agent frameworks and a live gateway.

The clients must get the expected answers, and the gateway must record every call exactly and in the right
session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from instar.config import ModelConfig, RunConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.gateway.auth import create_key
from instar.gateway.base import OpenSession
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
from tests.integration.clients.supported_clients import CALL_COUNTS, CLIENTS, Client, get_expected_answers
from tests.serving import ADMIN_KEY, running_gateway

pytestmark = pytest.mark.timeout(600)  # the clients may have to be installed first
RUN_NAME = "clients"


MALFORMED_CALL_VARIANTS = {
    "openai": ["chat", "chat-stream", "responses", "responses-stream"],
    "anthropic": ["messages", "messages-stream"],
    "openai_agents": ["chat-stream", "responses"],
    "pydantic_ai": ["chat", "messages-stream"],
    "langgraph": ["chat-stream", "messages"],
}


@dataclass
class ClientHarness:
    """A gateway with a scripted engine and a store."""

    url: str
    store: SqliteStore
    home: Path
    decode: Callable[[list[int]], str]
    _agent_keys: dict[str, str] = field(default_factory=dict[str, str])

    async def make_session_job(self, variant: str, question: str) -> ClientJob:
        """Open a session and return a job that uses it."""
        client = GatewayClient(self.url, ADMIN_KEY)
        session = await client.open_session(OpenSession(channel=Channel.TRAIN))
        await client.close()
        return ClientJob(session.base_url.removesuffix("/v1"), session.api_key, variant, question, THANKS)

    async def make_live_job(self, variant: str, question: str, agent: str) -> ClientJob:
        """Return a job with an agent's key. The gateway has to group its calls into sessions."""
        if agent not in self._agent_keys:
            self._agent_keys[agent] = await create_key(self.store, "agent", agent, agent)
        return ClientJob(self.url, self._agent_keys[agent], variant, question, THANKS)

    async def run_and_check_jobs(
        self, name: str, style_by_variant: Mapping[str, str], jobs: Sequence[ClientJob]
    ) -> dict[str, Counter[tuple[int, int]]]:
        """Run all jobs concurrently, check their answers, and return the usage by question."""
        usage_by_question: dict[str, Counter[tuple[int, int]]] = {}
        for job, result in zip(jobs, await run_client(name, jobs, self.home), strict=True):
            assert not result.error, f"{job.variant}: {result.error}"
            assert result.answers == get_expected_answers(
                parse_question_number(job), style_by_variant[job.variant]
            ), job.variant
            usage_by_question.setdefault(job.question, Counter()).update(result.usage)
        return usage_by_question


def parse_question_number(job: ClientJob) -> int:
    return int(job.question.split()[2])


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[ClientHarness]:
    model = ModelConfig(name=str(resolve_model(DEFAULT_MODEL)), max_context=200_000)
    script = ScriptedEngineConfig(function="tests.integration.clients.script:smollm2")
    engine, store = ScriptedEngine(model, script), SqliteStore(tmp_path / "store.db")
    decode = load_tokenizer(Path(model.name)).decode
    async with running_gateway(RunConfig(name=RUN_NAME, model=model), store, engine) as url:
        yield ClientHarness(url, store, tmp_path, decode)
    await engine.close()
    await store.close()


def check_exact(recorded: RecordedSession, *, rewrites_replies: bool) -> None:
    """Check that every call that continues an earlier call starts with that call's tokens, and that every
    sampled token is trained.

    If the client rewrites replies, no call may continue an earlier one. Otherwise all must, except the first
    call and the first after a handoff.
    """
    assert all(call.status is CallStatus.OK and call.trainable for call in recorded.calls)
    continuing_calls = 0
    for i, call in enumerate(recorded.calls):
        if call.dialect == "completions":
            parent = recorded.calls[i - 1] if i else None
        else:
            parent = find_continued_call(call, recorded.calls[:i])
        if parent is not None:
            assert is_exact(call, parent), (call.link, call.messages)
            continuing_calls += 1
    has_handoff = recorded.calls[0].tools != recorded.calls[-1].tools
    assert continuing_calls == (0 if rewrites_replies else len(recorded.calls) - 1 - has_handoff)
    assert count_trained_tokens(recorded) == count_sampled_tokens(recorded.calls)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: f"{client.name}-{next(iter(client.variants))}")
async def test_client_conversations_are_answered_and_recorded_exactly(
    harness: ClientHarness, client: Client
) -> None:
    """Each variant runs four times concurrently with equal messages: in two opened sessions and as two live
    agents. A live agent has one conversation per variant."""
    numbered_variants = dict(enumerate(client.variants.items(), start=20))
    jobs: list[ClientJob] = []
    for number, (variant, style) in numbered_variants.items():
        question = make_question(number, style)
        jobs += [
            await harness.make_session_job(variant, question),
            await harness.make_session_job(variant, question),
        ]
        jobs += [
            await harness.make_live_job(variant, question, "one"),
            await harness.make_live_job(variant, question, "two"),
        ]
    usage_by_question = await harness.run_and_check_jobs(client.name, client.variants, jobs)
    recorded_sessions = await load_recorded_sessions(harness.store, RUN_NAME)
    for number, (variant, style) in numbered_variants.items():
        question = make_question(number, style)
        variant_sessions = select_calls_with_question(recorded_sessions, question, harness.decode)
        call_counts = [len(recorded.calls) for recorded in variant_sessions]
        assert call_counts == [CALL_COUNTS.get(style, 4)] * 4, variant
        live_agents = Counter(
            recorded.session.agent_id
            for recorded in variant_sessions
            if recorded.session.channel is Channel.LIVE
        )
        assert live_agents == Counter(["one", "two"])
        for recorded in variant_sessions:
            check_exact(recorded, rewrites_replies=client.rewrites_replies)
        if usage := usage_by_question[question]:  # not every client reports its usage
            calls = [call for recorded in variant_sessions for call in recorded.calls]
            assert usage == count_usage(calls), variant


@pytest.mark.parametrize("name", MALFORMED_CALL_VARIANTS)
async def test_malformed_tool_call_is_recorded_as_plain_text(harness: ClientHarness, name: str) -> None:
    variants = dict.fromkeys(MALFORMED_CALL_VARIANTS[name], "malformed")
    jobs = [
        await harness.make_session_job(variant, make_question(20 + i, "malformed"))
        for i, variant in enumerate(variants)
    ]
    await harness.run_and_check_jobs(name, variants, jobs)
    for recorded in await load_recorded_sessions(harness.store, RUN_NAME):
        assert [call.reply["content"] for call in recorded.calls] == [MALFORMED, WELCOME]
        check_exact(recorded, rewrites_replies=False)
