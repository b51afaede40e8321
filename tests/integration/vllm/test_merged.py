"""A vLLM server that Instar starts, its weights replaced while it samples."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from instar.config import RunConfig
from instar.engines.base import Engine
from instar.engines.remote import RemoteEngine
from instar.errors import EngineError, EngineUnavailable
from instar.types import Artifact, Policy, SamplingParams
from tests.integration.vllm.parity import GAP, PROMPT, Training, check_parity
from tests.integration.vllm.servers import TOKEN, ServedEngine, model_config, vllm_config, vllm_model
from tests.unit.engines.conformance import EngineConformance, collect, ids_of, versions_of

pytestmark = pytest.mark.timeout(900)
BASE = Policy("p", 0, Artifact("base"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def served(tiny: Path, logs: Path) -> Iterator[ServedEngine]:
    run = RunConfig(model=model_config(tiny), engine=vllm_config(policy="auto"))
    served = ServedEngine(run, logs / "engine.log")
    yield served
    served.close()


@pytest.fixture
async def engine(served: ServedEngine) -> AsyncIterator[Engine]:
    remote = await RemoteEngine.connect(served.url, TOKEN)
    await remote.load(BASE)
    yield remote
    await remote.close()
    assert served.engine.mislabelled_tokens == 0, "by what vLLM itself says of every token"


class TestVllm(EngineConformance):
    pass


async def test_auto_policy_is_merged_on_cpu_with_a_separate_log(engine: Engine, logs: Path) -> None:
    assert engine.info.kind == "vllm"
    assert engine.info.versions_per_token
    assert (logs / "engine-vllm.log").stat().st_size > 0
    assert not (logs / "engine.log").exists()


async def test_engine_matches_the_trainer_after_each_load(engine: Engine, tiny: Path, tmp_path: Path) -> None:
    for lora in (True, False):
        training = Training(tiny, tmp_path / str(lora), lora=lora)
        before = await engine.logprobs(PROMPT)
        for _ in range(2):
            policy = await training.step()
            await engine.load(policy)
            await check_parity(engine, training, policy)
            now = await engine.logprobs(PROMPT)
            assert np.abs(now - before)[1:].max() > 10 * GAP, "each version is another one"
            before = now
        await training.backend.close()
        await engine.load(BASE)


async def test_replies_continue_under_new_weights(engine: Engine, tiny: Path, tmp_path: Path) -> None:
    training = Training(tiny, tmp_path)
    first, second = await training.step(), await training.step()
    streams = [
        asyncio.create_task(collect(engine, [*PROMPT, n + 3], max_tokens=200, seed=n)) for n in range(24)
    ]
    while (await engine.status()).generated_tokens == 0:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await engine.load(first)
    await asyncio.sleep(0.3)
    await engine.load(second)
    replies = await asyncio.gather(*streams)
    for chunks in replies:
        versions = versions_of(chunks)
        assert len(versions) == 200 or chunks[-1].finish_reason == "stop"
        assert versions == sorted(versions)
    seen = [tuple(sorted(set(versions_of(chunks)))) for chunks in replies]
    assert (0, 1, 2) in seen
    await training.backend.close()


async def test_tokens_after_a_load_have_logprobs_of_the_new_weights(
    engine: Engine, tiny: Path, tmp_path: Path
) -> None:
    """Its tokens have the trainer's logprobs given all before: nothing computed under the old weights is
    read again, by the reply itself or by one that begins later."""
    training = Training(tiny, tmp_path)
    policy = await training.step()
    stream = engine.generate(PROMPT, SamplingParams(max_tokens=220, temperature=0))
    chunks = [await anext(stream)]
    await engine.load(policy)
    chunks += [chunk async for chunk in stream]
    ids, versions = ids_of(chunks), versions_of(chunks)
    told = np.asarray([value for chunk in chunks for value in chunk.logprobs])
    theirs = (await training.logprobs([*PROMPT, *ids]))[len(PROMPT) :]
    new = np.asarray(versions) == 1
    assert set(versions) == {0, 1}
    np.testing.assert_allclose(told[new], theirs[new], atol=GAP)
    assert np.abs(told[~new] - theirs[~new]).max() > 0.05, "the old part is another model's"
    await check_parity(engine, training, policy)  # the same prompt again
    await training.backend.close()


async def test_unreadable_policy_keeps_the_served_version(engine: Engine, tiny: Path, tmp_path: Path) -> None:
    before = ids_of(await collect(engine, PROMPT, max_tokens=8, temperature=0))
    other = vllm_model(tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"nonsense")
    (tmp_path / "adapter").mkdir()
    for kind, path in (("weights", other), ("adapter", tmp_path / "adapter")):
        with pytest.raises(EngineError, match="cannot be read"):
            await engine.load(Policy("p", 7, Artifact(kind, str(path))))  # type: ignore[arg-type]
        assert (await engine.status()).version == 0
    assert ids_of(await collect(engine, PROMPT, max_tokens=8, temperature=0)) == before


async def test_load_of_truncated_weights_keeps_the_served_version(
    engine: Engine, tiny: Path, tmp_path: Path
) -> None:
    """The headers of the files are right, so it is vLLM that finds that their end is missing."""
    before = ids_of(await collect(engine, PROMPT, max_tokens=8, temperature=0))
    cut = tmp_path / "cut"
    shutil.copytree(tiny, cut)
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EngineError):
        await engine.load(Policy("p", 7, Artifact("weights", str(cut))))
    assert (await engine.status()).version == 0
    assert ids_of(await collect(engine, PROMPT, max_tokens=8, temperature=0)) == before


async def test_concurrent_seeded_requests_are_reproducible(engine: Engine) -> None:
    """More prompt tokens than a step computes: vLLM dies on a CPU of a seeded prompt that it divides."""
    prompts = [[3 + (n + i) % 300 for i in range(200)] for n in range(80)]
    replies = await asyncio.gather(
        *(collect(engine, prompt, max_tokens=8, seed=n) for n, prompt in enumerate(prompts))
    )
    again = await collect(engine, prompts[5], max_tokens=8, seed=5)
    assert ids_of(replies[5]) == ids_of(again)


async def test_repeated_prompt_uses_the_prefix_cache(engine: Engine) -> None:
    prompt = [7] * 200  # on a CPU, vLLM keeps blocks of 128
    before = (await engine.status()).cached_tokens
    await collect(engine, prompt, max_tokens=1)
    await collect(engine, prompt, max_tokens=1)
    assert (await engine.status()).cached_tokens > before


async def test_killed_server_restarts_with_the_current_policy(
    engine: Engine, served: ServedEngine, logs: Path, tiny: Path, tmp_path: Path
) -> None:
    training = Training(tiny, tmp_path)
    policy = await training.step()
    await engine.load(policy)
    (core,) = _processes("VLLM::EngineCor")  # before the reply, which takes little longer than looking
    stream = engine.generate(PROMPT, SamplingParams(max_tokens=220, temperature=0))
    await anext(stream)
    os.kill(core, signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        async for _ in stream:
            pass
    async with asyncio.timeout(20):
        while _is_ready(served):  # noqa: ASYNC110 - of another thread
            await asyncio.sleep(0.05)
    policy = await training.step()
    with pytest.raises(EngineUnavailable):
        await engine.load(policy)
    # A request made meanwhile waits for the server, which has been given that policy when it is back.
    await check_parity(engine, training, policy)
    assert any("starting it again" in line for line in served.said)
    await training.backend.close()


def _is_ready(served: ServedEngine) -> bool:
    try:
        served.wait(served.engine.status())
    except EngineUnavailable:
        return False
    return True


def _processes(name: str) -> list[int]:
    """Of this process's descendants."""
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        pid = todo.pop()
        tasks = Path(f"/proc/{pid}/task")
        children = [int(c) for t in tasks.iterdir() for c in (t / "children").read_text().split()]
        todo += children
        found += [c for c in children if Path(f"/proc/{c}/comm").read_text().startswith(name)]
    return found
