"""Tests for a vLLM server that is started by Instar, with weight updates during sampling."""

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
from instar.types import Artifact, Policy, SamplingParams, TokenChunk
from tests.integration.vllm.parity import LOGPROB_TOLERANCE, PROMPT, Training, check_parity
from tests.integration.vllm.servers import (
    ENGINE_PROCESS_NAME,
    TOKEN,
    ServedEngine,
    make_model_config,
    make_vllm_config,
    make_vllm_model,
)
from tests.unit.engines.conformance import (
    EngineConformance,
    collect,
    get_ids,
    get_versions,
    read_until_version,
)

pytestmark = pytest.mark.timeout(900)
BASE_POLICY = Policy("p", 0, Artifact("base"))
MAX_CONTEXT = 4096
LONG_REPLY_TOKENS = 2000
"""A reply of this length takes many seconds."""
LONGEST_REPLY_TOKENS = 4000
"""A reply of this length does not end before a signal arrives, even if this process is rarely scheduled."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def served(tiny: Path, log_folder: Path) -> Iterator[ServedEngine]:
    config = RunConfig(model=make_model_config(tiny, MAX_CONTEXT), engine=make_vllm_config(policy="auto"))
    served = ServedEngine(config, log_folder / "engine.log")
    yield served
    served.close()


@pytest.fixture
async def engine(served: ServedEngine) -> AsyncIterator[Engine]:
    remote = await RemoteEngine.connect(served.url, TOKEN)
    await remote.load(BASE_POLICY)
    yield remote
    await remote.close()
    assert served.engine.mislabelled_tokens == 0, "token versions differ from those that vLLM reported"


class TestVllm(EngineConformance):
    max_context = MAX_CONTEXT
    long_reply_tokens = LONG_REPLY_TOKENS


async def test_auto_policy_is_merged_on_cpu_with_a_separate_log(engine: Engine, log_folder: Path) -> None:
    assert engine.info.kind == "vllm"
    assert engine.info.versions_per_token
    assert (log_folder / "engine-vllm.log").stat().st_size > 0
    assert not (log_folder / "engine.log").exists()


async def test_engine_matches_the_trainer_after_each_load(engine: Engine, tiny: Path, tmp_path: Path) -> None:
    for lora in (True, False):
        training = Training(tiny, tmp_path / str(lora), lora=lora)
        previous = await engine.logprobs(PROMPT)
        for _ in range(2):
            policy = await training.step()
            await engine.load(policy)
            await check_parity(engine, training, policy)
            logprobs = await engine.logprobs(PROMPT)
            assert np.abs(logprobs - previous)[1:].max() > 10 * LOGPROB_TOLERANCE, (
                "the new version must differ from the previous one"
            )
            previous = logprobs
        await training.backend.close()
        await engine.load(BASE_POLICY)


async def test_replies_continue_under_new_weights(engine: Engine, tiny: Path, tmp_path: Path) -> None:
    training = Training(tiny, tmp_path)
    first, second = await training.step(), await training.step()
    replies: list[list[TokenChunk]] = []
    is_loaded = asyncio.Event()

    async def reply_until_loaded(number: int) -> None:
        while not is_loaded.is_set():  # a reply may end before the weights are loaded
            replies.append(await collect(engine, [*PROMPT, number + 3], max_tokens=1000, seed=number))

    async with asyncio.TaskGroup() as tasks:
        for number in range(24):
            tasks.create_task(reply_until_loaded(number))
        await _wait_for_new_tokens(engine)
        await engine.load(first)
        await _wait_for_new_tokens(engine)
        await engine.load(second)
        is_loaded.set()
    for chunks in replies:
        versions = get_versions(chunks)
        assert len(versions) == 1000 or chunks[-1].finish_reason == "stop"
        assert versions == sorted(versions)
    version_sets = [set(get_versions(chunks)) for chunks in replies]
    assert any({0, 1} <= versions for versions in version_sets)
    assert any({1, 2} <= versions for versions in version_sets)
    await training.backend.close()


async def _wait_for_new_tokens(engine: Engine) -> None:
    start = (await engine.status()).generated_tokens
    async with asyncio.timeout(60):
        while (await engine.status()).generated_tokens < start + 48:  # noqa: ASYNC110 - the engine is remote
            await asyncio.sleep(0.01)


async def test_tokens_after_a_load_have_logprobs_of_the_new_weights(
    engine: Engine, tiny: Path, tmp_path: Path
) -> None:
    """Neither the same reply nor a later one may reuse keys and values of the old weights."""
    training = Training(tiny, tmp_path)
    policy = await training.step()
    stream = engine.generate(PROMPT, SamplingParams(max_tokens=LONG_REPLY_TOKENS, temperature=0))
    chunks = [await anext(stream)]
    await engine.load(policy)
    chunks += await read_until_version(stream, 1, token_count=100)
    ids, versions = get_ids(chunks), get_versions(chunks)
    actual = np.asarray([value for chunk in chunks for value in chunk.logprobs])
    expected = (await training.compute_logprobs([*PROMPT, *ids]))[len(PROMPT) :]
    new_mask = np.asarray(versions) == 1
    assert set(versions) == {0, 1}
    np.testing.assert_allclose(actual[new_mask], expected[new_mask], atol=LOGPROB_TOLERANCE)
    assert np.abs(actual[~new_mask] - expected[~new_mask]).max() > 0.05, (
        "the first tokens must be sampled with the old weights"
    )
    await check_parity(engine, training, policy)  # uses the same prompt again
    await training.backend.close()


async def test_unreadable_policy_keeps_the_served_version(engine: Engine, tiny: Path, tmp_path: Path) -> None:
    before = get_ids(await collect(engine, PROMPT, max_tokens=8, temperature=0))
    invalid_model = make_vllm_model(tmp_path / "invalid")
    (invalid_model / "model.safetensors").write_bytes(b"invalid")
    (tmp_path / "adapter").mkdir()
    for kind, path in (("weights", invalid_model), ("adapter", tmp_path / "adapter")):
        with pytest.raises(EngineError, match="cannot be read"):
            await engine.load(Policy("p", 7, Artifact(kind, str(path))))  # type: ignore[arg-type]
        assert (await engine.status()).version == 0
    assert get_ids(await collect(engine, PROMPT, max_tokens=8, temperature=0)) == before


async def test_load_of_truncated_weights_keeps_the_served_version(
    engine: Engine, tiny: Path, tmp_path: Path
) -> None:
    """The file header is valid, so vLLM itself detects that the file is truncated."""
    before = get_ids(await collect(engine, PROMPT, max_tokens=8, temperature=0))
    truncated = tmp_path / "truncated"
    shutil.copytree(tiny, truncated)
    content = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(EngineError):
        await engine.load(Policy("p", 7, Artifact("weights", str(truncated))))
    assert (await engine.status()).version == 0
    assert get_ids(await collect(engine, PROMPT, max_tokens=8, temperature=0)) == before


async def test_concurrent_seeded_requests_are_reproducible(engine: Engine) -> None:
    """The prompts do not fit into one step. On a CPU, vLLM would crash if it split a seeded prompt."""
    prompts = [[3 + (n + i) % 300 for i in range(200)] for n in range(80)]
    replies = await asyncio.gather(
        *(collect(engine, prompt, max_tokens=8, seed=n) for n, prompt in enumerate(prompts))
    )
    repeated = await collect(engine, prompts[5], max_tokens=8, seed=5)
    assert get_ids(replies[5]) == get_ids(repeated)


async def test_repeated_prompt_uses_the_prefix_cache(engine: Engine) -> None:
    prompt = [7] * 200  # vLLM on a CPU caches blocks of 128 tokens
    before = (await engine.status()).cached_tokens
    await collect(engine, prompt, max_tokens=1)
    await collect(engine, prompt, max_tokens=1)
    assert (await engine.status()).cached_tokens > before


async def test_killed_server_restarts_with_the_current_policy(
    engine: Engine, served: ServedEngine, log_folder: Path, tiny: Path, tmp_path: Path
) -> None:
    training = Training(tiny, tmp_path)
    policy = await training.step()
    await engine.load(policy)
    (core_pid,) = _find_descendants(ENGINE_PROCESS_NAME)
    params = SamplingParams(max_tokens=LONGEST_REPLY_TOKENS, temperature=0)
    # Some of the replies may end early with an end-of-sequence token.
    streams = [engine.generate([*PROMPT, n + 3], params) for n in range(8)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    os.kill(core_pid, signal.SIGKILL)
    errors = await asyncio.gather(*(_read_error(stream) for stream in streams))
    assert any(isinstance(error, EngineUnavailable) for error in errors), errors
    async with asyncio.timeout(20):
        while _is_ready(served):  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.05)
    policy = await training.step()
    with pytest.raises(EngineUnavailable):
        await engine.load(policy)
    # A request during the restart waits for the server, which then serves that policy.
    await check_parity(engine, training, policy)
    assert any("restarting it" in line for line in served.reports)
    await training.backend.close()


async def _read_error(stream: AsyncIterator[TokenChunk]) -> EngineError | None:
    """Read the rest of a reply and return the error that ended it, or None if it is complete."""
    try:
        async for _ in stream:
            pass
    except EngineError as error:
        return error
    return None


def _is_ready(served: ServedEngine) -> bool:
    try:
        served.run_in_loop(served.engine.status())
    except EngineUnavailable:
        return False
    return True


def _find_descendants(name: str) -> list[int]:
    """Return the ids of this process's descendants whose name starts with ``name``."""
    pids: list[int] = []
    remaining = [os.getpid()]
    while remaining:
        pid = remaining.pop()
        tasks = Path(f"/proc/{pid}/task")
        children = [int(c) for t in tasks.iterdir() for c in (t / "children").read_text().split()]
        remaining += children
        pids += [c for c in children if Path(f"/proc/{c}/comm").read_text().startswith(name)]
    return pids
