"""Tests for the versions that answer the live requests of each agent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from instar.config import CanaryConfig, GatewayConfig, ModelConfig, ScriptedEngineConfig
from instar.engines.scripted import ScriptedEngine
from instar.errors import EngineError
from instar.gateway.auth import create_key
from instar.gateway.live_policies import LiveOptions, is_selected
from instar.types import Artifact, Policy, PolicyRef, PolicyStage
from tests.unit.gateway.conftest import ADMIN_KEY, RunningGateway, StartGateway
from tests.versions import publish_canary, publish_candidate, publish_serving

POLICY = "policy"
LIVE = LiveOptions()
DEADLINE_SECONDS = 120


class FolderEngine(ScriptedEngine):
    """A scripted engine that cannot read the folder `broken`, and takes a second to read `slow`."""

    def __init__(self, model: ModelConfig, config: ScriptedEngineConfig) -> None:
        super().__init__(model, config)
        self.paths: list[str] = []

    async def keep(self, policy: Policy) -> None:
        if policy.artifact.path == "broken":
            raise EngineError("The adapter in broken cannot be read.")
        if policy.artifact.path == "slow":
            await asyncio.sleep(1.0)
        self.paths.append(policy.artifact.path)
        await super().keep(policy)


def make_engine(model: ModelConfig, *, delay: float = 0.0, max_adapters: int = 4) -> FolderEngine:
    script = ScriptedEngineConfig(
        function="tests.unit.gateway.scripts:reply", delay=delay, max_adapters=max_adapters
    )
    return FolderEngine(model, script)


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await condition():  # noqa: ASYNC110 - the store is asked
            await asyncio.sleep(0.02)


async def chat(
    gateway: RunningGateway, key: str = ADMIN_KEY, *, path: str = "", text: str = "hi", model: str = "m"
) -> httpx.Response:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}]}
    body["max_tokens"] = 200 if text == "long" else 16
    return await gateway.post_json(f"{path}/v1/chat/completions", body, key)


async def get_versions(gateway: RunningGateway, response: httpx.Response) -> set[int]:
    assert response.status_code == 200, response.text
    (call,) = await gateway.store.calls_by_request(response.json()["id"])
    return set(call.versions.tolist())


async def wait_for_version(gateway: RunningGateway, version: int, key: str = ADMIN_KEY) -> None:
    async def is_served() -> bool:
        return await get_versions(gateway, await chat(gateway, key)) == {version}

    await wait_until(is_served)


@pytest.fixture
async def gateway(start_gateway: StartGateway, model: ModelConfig) -> RunningGateway:
    return await start_gateway(make_engine(model), live=LIVE)


async def test_promotion_applies_to_the_next_request_of_an_open_session(gateway: RunningGateway) -> None:
    opened = await gateway.open_session()
    path = f"/s/{opened.session_id}"
    assert await get_versions(gateway, await chat(gateway, path=path)) == {0}
    version = await publish_serving(gateway.store, POLICY)
    await wait_for_version(gateway, version)
    assert await get_versions(gateway, await chat(gateway, path=path)) == {version}


async def test_request_in_flight_ends_under_the_version_it_started_with(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    gateway = await start_gateway(make_engine(model, delay=0.02), live=LIVE)
    long_call = asyncio.create_task(chat(gateway, text="long"))
    await asyncio.sleep(0.5)
    version = await publish_serving(gateway.store, POLICY)
    await wait_for_version(gateway, version)
    assert not long_call.done()
    assert await get_versions(gateway, await long_call) == {0}


async def test_candidate_is_not_served_before_its_promotion(gateway: RunningGateway) -> None:
    candidate = await publish_candidate(gateway.store, POLICY)
    other = await publish_serving(gateway.store, "unrelated")
    assert (candidate, other) == (1, 1)
    await asyncio.sleep(1.2)  # longer than the gateway takes to read the versions
    assert await get_versions(gateway, await chat(gateway)) == {0}


async def test_rollback_applies_to_canary_sessions_and_sessions_in_progress(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    gateway = await start_gateway(make_engine(model), live=LIVE)
    first = await publish_serving(gateway.store, POLICY)
    await wait_for_version(gateway, first)
    second = await publish_serving(gateway.store, POLICY)
    await wait_for_version(gateway, second)
    canary = await publish_canary(gateway.store, POLICY)
    session_id = await open_canary_session(gateway, canary)
    pinned = await gateway.open_session()
    assert await get_versions(gateway, await chat(gateway, path=f"/s/{session_id}")) == {canary}
    assert await get_versions(gateway, await chat(gateway, path=f"/s/{pinned.session_id}")) <= {
        second,
        canary,
    }
    third = await gateway.store.roll_back(POLICY, "run", first)
    await wait_for_version(gateway, third)
    for name in (session_id, pinned.session_id):
        assert await get_versions(gateway, await chat(gateway, path=f"/s/{name}")) == {third}


async def open_canary_session(gateway: RunningGateway, canary: int) -> str:
    """Open sessions until the canary serves one, and return its id."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            opened = await gateway.open_session()
            session = await gateway.store.session(opened.session_id)
            assert session is not None
            if session.canary_version == canary:
                return opened.session_id


async def test_canary_that_is_exported_again_serves_its_sessions_without_a_gap(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    engine = make_engine(model)
    gateway = await start_gateway(engine, live=LIVE)
    first = await publish_serving(gateway.store, POLICY)
    await wait_for_version(gateway, first)
    canary = await publish_canary(gateway.store, POLICY)
    session_id = await open_canary_session(gateway, canary)
    for version in (first, canary):
        await gateway.store.publish(Policy(POLICY, version, Artifact("remote", "slow")))
    async with asyncio.timeout(DEADLINE_SECONDS):
        while engine.paths.count("slow") < 2:
            response = await chat(gateway, path=f"/s/{session_id}")
            assert await get_versions(gateway, response) == {canary}


async def test_version_that_cannot_be_loaded_leaves_the_old_one_serving(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    first = await publish_serving(gateway.store, POLICY)
    await wait_for_version(gateway, first)
    broken = await publish_serving(gateway.store, POLICY, artifact=Artifact("adapter", "broken"))

    async def is_reported() -> bool:
        return "policy@2 (serving) cannot be loaded" in caplog.text

    await wait_until(is_reported)
    assert "policy@1 continues to serve" in caplog.text
    assert await get_versions(gateway, await chat(gateway)) == {first}
    fixed = await publish_serving(gateway.store, POLICY)
    await wait_for_version(gateway, fixed)
    assert broken < fixed


async def test_version_that_the_engine_lost_is_loaded_again(gateway: RunningGateway) -> None:
    version = await publish_serving(gateway.store, POLICY)
    await wait_for_version(gateway, version)
    assert gateway.engine is not None
    await gateway.engine.unload(PolicyRef(POLICY, version))
    assert await get_versions(gateway, await chat(gateway)) == {version}


async def test_more_policies_than_the_engine_holds_take_turns(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    agents = {f"agent-{number}": f"run/agent-{number}" for number in range(4)}
    engine = make_engine(model, delay=0.001, max_adapters=2)
    gateway = await start_gateway(engine, live=LIVE, agent_policies=agents)
    keys = {agent: await create_key(gateway.store, "agent", agent) for agent in agents}
    for policy_id in agents.values():
        await publish_serving(gateway.store, policy_id)
    for key in keys.values():
        await wait_for_version(gateway, 1, key)
    calls = [chat(gateway, key, text=f"{number}") for number in range(4) for key in keys.values()]
    for response in await asyncio.gather(*calls):
        assert await get_versions(gateway, response) == {1}


async def test_agents_only_get_and_name_versions_of_their_own_policy(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    agents = {"a": "run/a", "b": "run/b"}
    gateway = await start_gateway(make_engine(model), live=LIVE, agent_policies=agents)
    keys = {agent: await create_key(gateway.store, "agent", agent) for agent in (*agents, "observed")}
    await publish_serving(gateway.store, "run/a")
    await publish_serving(gateway.store, "run/b")
    await wait_for_version(gateway, 1, keys["b"])
    await publish_serving(gateway.store, "run/b")
    await wait_for_version(gateway, 1, keys["a"])
    await wait_for_version(gateway, 2, keys["b"])
    assert await get_versions(gateway, await chat(gateway, keys["observed"])) == {0}
    for agent, version in (("a", 1), ("b", 2)):
        response = await chat(gateway, keys[agent])
        (call,) = await gateway.store.calls_by_request(response.json()["id"])
        assert (call.policy_id, set(call.versions.tolist())) == (f"run/{agent}", {version})
        session = await gateway.store.session(call.session_id)
        assert session is not None
        assert session.policy_id == f"run/{agent}"
    assert await get_versions(gateway, await chat(gateway, keys["b"], model="run/b@1")) == {1}
    assert await get_versions(gateway, await chat(gateway, model="run/a@1")) == {1}
    response = await chat(gateway, keys["a"], model="run/b@2")
    assert response.status_code == 404
    assert "its own versions are run/a@VERSION" in response.text
    assert await list_models(gateway, keys["a"]) == ["run/a", "run/a@1"]
    assert await list_models(gateway, keys["observed"]) == ["policy", "policy@0"]
    assert {"policy", "run/a@1", "run/b@1", "run/b@2"} <= set(await list_models(gateway, ADMIN_KEY))
    response = await gateway.http.get("/v1/models/run/b@2", headers={"Authorization": f"Bearer {keys['a']}"})
    assert response.status_code == 404


async def list_models(gateway: RunningGateway, key: str) -> list[str]:
    response = await gateway.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    return [model["id"] for model in response.json()["data"]]


async def test_agent_cannot_name_a_version_that_is_not_promoted(gateway: RunningGateway) -> None:
    key = await create_key(gateway.store, "agent", "agent")
    canary = await publish_canary(gateway.store, POLICY)
    await open_canary_session(gateway, canary)
    response = await chat(gateway, key, model=f"{POLICY}@{canary}")
    assert response.status_code == 404
    assert f"does not have policy@{canary}; it has policy@0" in response.text
    assert await get_versions(gateway, await chat(gateway, model=f"{POLICY}@{canary}")) == {canary}


async def test_agent_cannot_name_a_candidate_that_is_loaded_for_its_evaluation(
    gateway: RunningGateway,
) -> None:
    key = await create_key(gateway.store, "agent", "agent")
    serving = await publish_serving(gateway.store, POLICY)
    await wait_for_version(gateway, serving)
    candidate = await publish_candidate(gateway.store, POLICY)
    assert gateway.engine is not None
    await gateway.engine.keep(Policy(POLICY, candidate, Artifact("adapter", "x")))
    assert (await chat(gateway, key, model=f"{POLICY}@{candidate}")).status_code == 404
    assert await list_models(gateway, key) == [POLICY, f"{POLICY}@{serving}"]
    await gateway.store.reject_version(POLICY, candidate, "worse")
    assert (await chat(gateway, key, model=f"{POLICY}@{candidate}")).status_code == 404
    assert await get_versions(gateway, await chat(gateway, model=f"{POLICY}@{candidate}")) == {candidate}


async def test_canary_serves_its_share_of_new_sessions_also_after_a_restart(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    config = GatewayConfig(max_sessions_in_memory=2000)
    gateway = await start_gateway(make_engine(model), config, live=LIVE)
    earlier = [await gateway.open_session() for _ in range(20)]
    canary = await publish_canary(gateway.store, POLICY)
    await open_canary_session(gateway, canary)

    async def chat_in(gateway: RunningGateway, session: Any) -> set[int]:
        return await get_versions(gateway, await chat(gateway, path=f"/s/{session.session_id}"))

    assert {v for session in earlier for v in await chat_in(gateway, session)} == {0}
    sessions: list[Any] = []
    for _ in range(20):
        sessions += await asyncio.gather(*(gateway.open_session() for _ in range(50)))
    served = {row.session.session_id: row.session for row in await gateway.store.sessions("run")}
    canaries = [s for s in sessions if served[s.session_id].canary_version == canary]
    others = [session for session in sessions if session not in canaries]
    assert 70 <= len(canaries) <= 130  # 0.1 of 1,000, within three standard deviations
    for session in canaries[:5]:
        assert await chat_in(gateway, session) == {canary}
    restarted = await start_gateway(make_engine(model), config, live=LIVE)
    await open_canary_session(restarted, canary)
    for session in canaries[:10]:
        assert await chat_in(restarted, session) == {canary}
    for session in (*others[:10], *earlier[:5]):
        assert await chat_in(restarted, session) == {0}
    await restarted.store.reject_version(POLICY, canary, "worse")

    async def is_replaced() -> bool:
        return await chat_in(restarted, canaries[0]) == {0}

    await wait_until(is_replaced)


async def test_first_call_of_a_session_without_a_name_chooses_the_canary(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    gateway = await start_gateway(make_engine(model), live=LiveOptions(CanaryConfig(share=0.1)))
    key = await create_key(gateway.store, "agent", "agent")
    canary = await publish_canary(gateway.store, POLICY)
    await open_canary_session(gateway, canary)
    versions: list[int] = []
    for number in range(60):
        response = await chat(gateway, key, text=f"question {number}")
        (call,) = await gateway.store.calls_by_request(response.json()["id"])
        session = await gateway.store.session(call.session_id)
        assert session is not None
        assert set(call.versions.tolist()) == {session.canary_version or 0}
        versions.append(session.canary_version or 0)
    assert set(versions) == {0, canary}


def test_selected_share_depends_on_the_name_and_the_version() -> None:
    names = [f"s{number}" for number in range(10_000)]
    selected = [{name for name in names if is_selected(0.1, name, version)} for version in (1, 2)]
    assert all(850 <= len(part) <= 1150 for part in selected)
    assert len(selected[0] & selected[1]) < 200


async def test_shadow_reply_is_stored_beside_the_call_and_never_shown(
    start_gateway: StartGateway, model: ModelConfig
) -> None:
    gateway = await start_gateway(make_engine(model), live=LiveOptions(CanaryConfig(shadow_share=1)))
    await wait_for_version(gateway, 0)
    version = await publish_candidate(gateway.store, POLICY)
    await gateway.store.advance_version(POLICY, version, PolicyStage.SHADOW, "test")

    async def has_shadow_reply() -> bool:
        assert await get_versions(gateway, await chat(gateway, text="ping")) == {0}
        return bool(await gateway.store.shadow_pairs(POLICY, version))

    await wait_until(has_shadow_reply)
    pair = (await gateway.store.shadow_pairs(POLICY, version))[0]
    shadow, call = pair.shadow, await gateway.store.call(pair.shadow.call_id)
    assert call is not None
    assert (pair.served_reply, pair.served_finish_reason) == (call.reply, call.finish_reason)
    assert (shadow.session_id, shadow.reply) == (call.session_id, call.reply)  # the script ignores versions
    assert shadow.sampled_ids.tolist() == call.sampled_ids.tolist()
    assert len(shadow.logprobs) == len(shadow.sampled_ids)
    assert {v for c in await gateway.store.calls(call.session_id) for v in c.versions.tolist()} == {0}
    await gateway.store.forget_sessions("run", [call.session_id])
    left = await gateway.store.shadow_pairs(POLICY, version)
    assert call.session_id not in {pair.shadow.session_id for pair in left}


async def test_live_call_interrupts_shadow_replies(start_gateway: StartGateway, model: ModelConfig) -> None:
    engine = make_engine(model, delay=0.01)
    gateway = await start_gateway(engine, live=LiveOptions(CanaryConfig(shadow_share=1)))
    version = await publish_candidate(gateway.store, POLICY)
    await gateway.store.advance_version(POLICY, version, PolicyStage.SHADOW, "test")

    async def is_sampling() -> bool:
        await chat(gateway, text="long")
        await asyncio.sleep(0.3)
        return (await engine.status()).running == 1

    await wait_until(is_sampling)
    live_call = asyncio.create_task(chat(gateway, text="long"))
    await asyncio.sleep(0.3)
    assert (await engine.status()).running == 1, "the shadow reply must stop"
    assert await get_versions(gateway, await live_call) == {0}

    async def is_stored() -> bool:
        return bool(await gateway.store.shadow_pairs(POLICY, version))

    await wait_until(is_stored)
