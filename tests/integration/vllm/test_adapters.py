"""Tests for an external vLLM server, which loads each policy version as an adapter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from instar.config import VllmEngineConfig
from instar.engines.base import Engine
from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.engine import VllmEngine
from instar.errors import ConfigError, EngineError, PolicyNotFound
from instar.types import Artifact, Policy, PolicyRef, SamplingParams
from tests.integration.vllm.parity import LOGPROB_TOLERANCE, PROMPT, Training, check_parity
from tests.integration.vllm.servers import KEY, make_model_config, make_vllm_model, run_vllm_server
from tests.unit.engines.conformance import collect, get_ids, get_logprobs, get_versions

pytestmark = pytest.mark.timeout(900)
API_KEY_ENV = "TEST_SERVER_API_KEY"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def url(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log_path = tmp_path_factory.mktemp("logs") / "vllm.log"
    arguments = ("--enable-lora", "--max-loras", "18", "--max-cpu-loras", "18", "--enable-scale-out")
    with run_vllm_server(tiny, log_path, *arguments) as url:
        yield url


def make_engine_config(url: str, **settings: object) -> VllmEngineConfig:
    return VllmEngineConfig.model_validate({"servers": [url], "api_key_env": API_KEY_ENV, **settings})


@pytest.fixture
def max_adapters() -> int:
    return 1


@pytest.fixture
async def engine(
    url: str, tiny: Path, max_adapters: int, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Engine]:
    monkeypatch.setenv(API_KEY_ENV, KEY)
    engine = VllmEngine(make_model_config(tiny), make_engine_config(url, max_adapters=max_adapters))
    await engine.start(Path("unused.log"), print)
    yield engine
    await engine.close()


async def list_loaded_adapters(url: str) -> list[str]:
    """Return the names of the loaded adapters without their random suffixes."""
    client = VllmClient(url, KEY)
    try:
        models = (await client.get("/v1/models"))["data"]
        return [entry["id"].rpartition("-")[0] for entry in models if entry.get("parent")]
    finally:
        await client.close()


async def wait_for_adapters(url: str, names: list[str]) -> None:
    async with asyncio.timeout(20):
        while await list_loaded_adapters(url) != names:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.05)


async def test_engine_matches_the_trainer_after_each_load(
    engine: Engine, url: str, tiny: Path, tmp_path: Path
) -> None:
    assert engine.info.artifacts == ("adapter", "base")
    training = Training(tiny, tmp_path)
    previous = await engine.logprobs(PROMPT)
    for _ in range(3):
        policy = await training.step()
        await engine.load(policy)
        await check_parity(engine, training, policy)
        logprobs = await engine.logprobs(PROMPT)
        assert np.abs(logprobs - previous)[1:].max() > 10 * LOGPROB_TOLERANCE, (
            "the new version must differ from the previous one"
        )
        previous = logprobs
    await wait_for_adapters(url, ["p-v3"])
    await engine.load(Policy("p", 4, Artifact("base")))
    await wait_for_adapters(url, [])
    await training.backend.close()


async def test_reply_finishes_under_its_adapter_before_it_is_unloaded(
    engine: Engine, url: str, tiny: Path, tmp_path: Path
) -> None:
    training = Training(tiny, tmp_path)
    first, second = await training.step(), await training.step()
    await engine.load(first)
    stream = engine.generate(PROMPT[::-1], SamplingParams(max_tokens=220, seed=3))
    chunks = [await anext(stream)]
    await engine.load(second)
    assert (await engine.status()).version == 2
    assert set(get_versions(await collect(engine, PROMPT, max_tokens=4))) == {2}
    assert await list_loaded_adapters(url) == ["p-v1", "p-v2"]
    chunks += [chunk async for chunk in stream]
    assert set(get_versions(chunks)) == {1}
    await wait_for_adapters(url, ["p-v2"])
    await engine.load(Policy("p", 3, Artifact("base")))
    await wait_for_adapters(url, [])
    await training.backend.close()


@pytest.mark.parametrize("max_adapters", [4])
async def test_adapters_in_one_batch_reply_as_each_does_alone(
    engine: Engine, url: str, tiny: Path, tmp_path: Path
) -> None:
    training = Training(tiny, tmp_path)
    first, second = await training.step(), await training.step()
    await engine.load(first)
    await engine.keep(second)
    refs = [first.ref, second.ref, PolicyRef("p", 0)]
    requests = [(PROMPT[n:], refs[n % 3]) for n in range(9)]
    alone = [await collect(engine, p, policy=ref, max_tokens=20, temperature=0) for p, ref in requests]
    together = await asyncio.gather(
        *(collect(engine, p, policy=ref, max_tokens=20, temperature=0) for p, ref in requests)
    )
    for (_, ref), expected, actual in zip(requests, alone, together, strict=True):
        assert get_ids(actual) == get_ids(expected)
        assert get_logprobs(actual) == pytest.approx(get_logprobs(expected), abs=LOGPROB_TOLERANCE)
        assert set(get_versions(actual)) == {ref.version}
    assert get_logprobs(alone[0]) != pytest.approx(
        get_logprobs(await collect(engine, PROMPT, policy=second.ref, max_tokens=20, temperature=0)),
        abs=LOGPROB_TOLERANCE,
    ), "the versions must differ"
    with pytest.raises(PolicyNotFound, match="does not have p@7; it has p@0, p@1, p@2"):
        await collect(engine, PROMPT, policy=PolicyRef("p", 7), max_tokens=2)
    await engine.unload(second.ref)
    await wait_for_adapters(url, ["p-v1"])
    await training.backend.close()


async def test_engine_rejects_unsupported_policies_and_settings(
    engine: Engine, url: str, tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="not weights"):
        await engine.load(Policy("p", 1, Artifact("weights", str(tiny))))
    with pytest.raises(EngineError, match=r"The adapter in .* cannot be read"):
        await engine.load(Policy("p", 1, Artifact("adapter", str(tmp_path))))
    assert (await engine.status()).version == 0
    for settings, max_context, message in (
        ({"policy": "merged"}, 256, "VLLM_SERVER_DEV_MODE"),
        ({}, 512, "--max-model-len"),
    ):
        model = make_model_config(tiny, max_context)
        misconfigured_engine = VllmEngine(model, make_engine_config(url, **settings))
        with pytest.raises(ConfigError, match=message):
            await misconfigured_engine.start(Path("unused.log"), print)


async def test_closed_stream_aborts_its_request(engine: Engine, url: str) -> None:
    stream = engine.generate(PROMPT, SamplingParams(max_tokens=240, temperature=0))
    await anext(stream)
    await stream.aclose()
    client = VllmClient(url, KEY)
    async with asyncio.timeout(20):
        while await count_running_requests(client):  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.05)
    await client.close()


async def count_running_requests(client: VllmClient) -> float:
    lines = str(await client.get("/metrics")).splitlines()
    (value,) = (line.split()[-1] for line in lines if line.startswith("vllm:num_requests_running"))
    return float(value)
