"""Tests for the vLLM engine with several adapters, or with merged weights, on a fake server.

The tests in tests/integration/vllm use real servers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from instar.config import VllmEngineConfig
from instar.engines.vllm.command import VllmInstallation, VllmLaunch
from instar.engines.vllm.engine import VllmEngine
from instar.errors import ConfigError, EngineError, PolicyNotFound
from instar.types import Artifact, Policy, PolicyRef, SamplingParams
from tests.unit.engines.conformance import collect, get_versions
from tests.unit.engines.fake_vllm import END_EVENT, StatefulFakeVllm, make_event
from tests.unit.engines.test_vllm_external import (
    connect_engine,
    make_adapter_policy,
    server_down,
    wait_until,
)

PROMPT = [1, 2, 3]


async def sample(server: StatefulFakeVllm, engine: VllmEngine, version: int | None) -> tuple[int, str | None]:
    """Return the version of a reply, and the folder of the adapter that it was requested from."""
    server.events.put_nowait(make_event(7, finish="length") + END_EVENT)
    server.events.put_nowait(None)
    policy = None if version is None else PolicyRef("run", version)
    (sampled_version,) = get_versions(await collect(engine, PROMPT, policy=policy, max_tokens=9))
    model = server.requested_models[-1]
    return sampled_version, None if model is None else Path(server.adapters[model]).name


def list_loaded(server: StatefulFakeVllm) -> list[str]:
    return sorted(Path(path).name for path in server.adapters.values())


async def test_requests_name_the_adapter_of_their_policy(tiny_model: Path, tmp_path: Path) -> None:
    async with (
        StatefulFakeVllm(tiny_model, supports_adapters=True).serving() as server,
        connect_engine(server, tiny_model) as engine,
    ):
        assert engine.info.serves_several_policies
        await engine.load(make_adapter_policy(tmp_path, 1))
        for _ in range(2):
            await engine.keep(make_adapter_policy(tmp_path, 2))
        assert list_loaded(server) == ["v1", "v2"]
        assert [await sample(server, engine, v) for v in (None, 0, 1, 2)] == [
            (1, "v1"),
            (0, None),
            (1, "v1"),
            (2, "v2"),
        ]
        with pytest.raises(PolicyNotFound, match=r"does not have run@3; it has run@0, run@1, run@2\."):
            await collect(engine, PROMPT, policy=PolicyRef("run", 3))
        status = await engine.status()
        assert (status.version, [ref.version for ref in status.policies]) == (1, [1, 2])


async def test_adapters_beyond_the_limit_are_unloaded_after_their_last_request(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with (
        StatefulFakeVllm(tiny_model, supports_adapters=True).serving() as server,
        connect_engine(server, tiny_model, max_adapters=2) as engine,
    ):
        await engine.load(make_adapter_policy(tmp_path, 1))
        await engine.keep(make_adapter_policy(tmp_path, 2))
        server.events.put_nowait(make_event(7))
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=9), PolicyRef("run", 2))
        assert (await anext(stream)).versions == [2]
        with pytest.raises(EngineError, match=r"run@3 cannot be loaded.*engine\.max_adapters"):
            await engine.keep(make_adapter_policy(tmp_path, 3))
        await engine.unload(PolicyRef("run", 2))
        await engine.keep(make_adapter_policy(tmp_path, 3))
        assert list_loaded(server) == ["v1", "v2", "v3"]
        server.events.put_nowait(make_event(8, finish="length") + END_EVENT)
        server.events.put_nowait(None)
        assert [v async for chunk in stream for v in chunk.versions] == [2]
        await wait_until(lambda: list_loaded(server) == ["v1", "v3"])
        await engine.load(make_adapter_policy(tmp_path, 4))
        await wait_until(lambda: list_loaded(server) == ["v3", "v4"])


async def test_restarted_server_has_only_the_served_policy(tiny_model: Path, tmp_path: Path) -> None:
    async with (
        StatefulFakeVllm(tiny_model, supports_adapters=True).serving() as server,
        connect_engine(server, tiny_model) as engine,
    ):
        await engine.load(make_adapter_policy(tmp_path, 1))
        await engine.keep(make_adapter_policy(tmp_path, 2))
        async with server_down(server, engine):
            server.restart()
        with pytest.raises(PolicyNotFound, match=r"it has run@0, run@1\."):
            await collect(engine, PROMPT, policy=PolicyRef("run", 2))
        assert await sample(server, engine, 1) == (1, "v1")


async def test_merged_weights_serve_only_one_policy(tiny_model: Path) -> None:
    policy = Policy("run", 1, Artifact("base"))
    async with (
        StatefulFakeVllm(tiny_model).serving() as server,
        connect_engine(server, tiny_model, policy="merged") as engine,
    ):
        assert not engine.info.serves_several_policies
        await engine.load(policy)
        for attempt in (
            collect(engine, PROMPT, policy=policy.ref),
            engine.keep(policy),
            engine.unload(policy.ref),
        ):
            with pytest.raises(PolicyNotFound, match="vllm engine serves only one policy version"):
                await attempt


async def test_max_adapters_is_rejected_with_merged_weights(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="max_adapters: 8 is not possible with `policy: merged`"):
        VllmEngineConfig(policy="merged", max_adapters=8)
    async with StatefulFakeVllm(tiny_model).serving() as server:
        with pytest.raises(ConfigError, match=r"engine\.max_adapters: 8 is not possible"):
            async with connect_engine(server, tiny_model, max_adapters=8):
                pass


@pytest.mark.parametrize(
    ("version", "max_adapters", "batch", "loaded"),
    [
        ("0.26.0", None, "4", "16"),
        ("0.26.0", 1, "4", "13"),
        ("0.26.0", 8, "8", "20"),
        # On a CPU, the last slot must stay empty.
        ("0.26.0+cpu", None, "18", "18"),
        ("0.26.0+cpu", 1, "15", "15"),
    ],
)
def test_launch_command_has_room_for_the_adapters(
    version: str, max_adapters: int | None, batch: str, loaded: str
) -> None:
    launch = VllmLaunch(
        config=VllmEngineConfig(max_adapters=max_adapters),
        vllm=VllmInstallation("python", version, needs_scale_out_flag=False),
        model=Path("model"),
        dtype="bf16",
        max_context=64,
        enable_lora=True,
        core_count=1,
    )
    command = launch.build_command(1)
    assert command[command.index("--max-loras") + 1] == batch
    assert command[command.index("--max-cpu-loras") + 1] == loaded
