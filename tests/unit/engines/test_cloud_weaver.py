"""Tests for the Weaver sampler with the real SDK, against a server with a tiny model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from instar.backends.weaver import WeaverBackend
from instar.config import (
    AdamConfig,
    CloudEngineConfig,
    LocalEngineConfig,
    ModelConfig,
    WeaverBackendConfig,
)
from instar.conformance.batches import make_tree_samples
from instar.conformance.cases import LOSS
from instar.engines.base import Engine
from instar.engines.cloud.weaver import WeaverSampler
from instar.engines.local.engine import LocalEngine
from instar.errors import EngineError, EngineUnavailable, PromptTooLong
from instar.types import Artifact, Policy, SamplingParams, TokenChunk
from tests.tiny import make_tiny_tokenizer
from tests.unit.engines.conformance import CloudConformance
from tests.unit.protocol.serving import serve_in_thread

API_KEY = "sk-weaver-test"
TOKENIZER = make_tiny_tokenizer()
PROMPT = TOKENIZER.encode("What is 615 plus 278?")
CreateEngine = Callable[..., WeaverSampler]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ModelConfig:
    return ModelConfig(name=str(tiny_model), dtype="fp32", device="cpu", max_context=256)


@pytest.fixture(scope="module")
def url(model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    folder = tmp_path_factory.mktemp("checkpoints")
    with serve_in_thread("weaver", model, folder=folder, keys=[API_KEY], base_model="tiny") as server_url:
        yield server_url


@pytest.fixture(scope="module")
def published(model: ModelConfig, url: str) -> list[Artifact]:
    """The artifacts that a backend published after each of two training steps."""

    async def publish() -> list[Artifact]:
        backend = WeaverBackend(model, make_backend_config(url))
        await backend.start()
        artifacts: list[Artifact] = []
        for version in (1, 2):
            await backend.forward_backward(make_tree_samples(), LOSS)
            await backend.optim_step(AdamConfig(lr=0.05))
            artifacts.append(await backend.publish(Path(f"v00000{version}")))
        await backend.close()
        return artifacts

    return asyncio.run(publish())


@pytest.fixture(scope="module")
def trained_artifact(published: list[Artifact]) -> Artifact:
    return published[0]


def make_backend_config(url: str, **overrides: object) -> WeaverBackendConfig:
    values = {"base_url": url, "api_key": API_KEY, "base_model": "tiny", "deadline": 30.0, **overrides}
    return WeaverBackendConfig.model_validate(values)


@pytest.fixture
async def create_engine(model: ModelConfig, url: str) -> AsyncGenerator[CreateEngine]:
    engines: list[WeaverSampler] = []

    def build(server_url: str = url, **overrides: object) -> WeaverSampler:
        engines.append(
            WeaverSampler(model, make_backend_config(server_url, **overrides), CloudEngineConfig())
        )
        return engines[-1]

    yield build
    for engine in engines:
        await engine.close()


class TestConformance(CloudConformance):
    @pytest.fixture
    async def engine(self, create_engine: CreateEngine) -> Engine:
        return create_engine()

    @pytest.fixture
    def artifacts(self, published: list[Artifact]) -> list[Artifact]:
        return published


async def sample_reply(engine: Engine, **params: object) -> TokenChunk:
    sampling = SamplingParams(**{"max_tokens": 12, "seed": 7, **params})  # type: ignore[arg-type]
    (chunk,) = [chunk async for chunk in engine.generate(PROMPT, sampling)]
    return chunk


async def test_weaver_sampler_matches_the_local_engine(
    create_engine: CreateEngine, model: ModelConfig
) -> None:
    engine, local = create_engine(), LocalEngine(model, LocalEngineConfig(threads=1))
    assert not engine.info.streams
    assert not engine.info.versions_per_token
    chunk = await sample_reply(engine)
    chunks = [c async for c in local.generate(PROMPT, SamplingParams(max_tokens=12, seed=7))]
    assert chunk.token_ids == [token for c in chunks for token in c.token_ids]
    np.testing.assert_allclose(chunk.logprobs, [x for c in chunks for x in c.logprobs], atol=1e-5)
    assert chunk.versions == [0] * len(chunk.token_ids)
    assert chunk.behavior_logprobs is None
    assert (await engine.status()).generated_tokens == len(chunk.token_ids)
    await local.close()


async def test_weaver_sampler_finishes_a_reply_under_the_old_version_after_a_load(
    create_engine: CreateEngine, trained_artifact: Artifact
) -> None:
    engine = create_engine()
    await engine.load(Policy("p", 3, Artifact("base")))
    old_reply_task = asyncio.ensure_future(sample_reply(engine, max_tokens=150))
    await asyncio.sleep(0)
    assert (await engine.status()).running
    await engine.load(Policy("p", 4, trained_artifact))
    new_reply = await sample_reply(engine)
    assert set(new_reply.versions) == {4}
    assert set((await old_reply_task).versions) == {3}
    base_engine = create_engine()
    assert (await sample_reply(base_engine)).logprobs != new_reply.logprobs


async def test_weaver_sampler_ends_replies_at_length_or_stop(create_engine: CreateEngine) -> None:
    engine = create_engine()
    complete = await sample_reply(engine, temperature=0, max_tokens=8)
    assert complete.finish_reason == "length"
    assert len(complete.token_ids) == 8
    third_token = complete.token_ids[2]
    stopped_by_token = await sample_reply(engine, temperature=0, max_tokens=8, stop_token_ids=(third_token,))
    assert stopped_by_token.token_ids == complete.token_ids[: complete.token_ids.index(third_token) + 1]
    assert (stopped_by_token.finish_reason, stopped_by_token.stop) == ("stop", None)
    stop_string = TOKENIZER.decode(complete.token_ids[2:4])
    stopped = await sample_reply(engine, temperature=0, max_tokens=8, stop=(stop_string,))
    assert (stopped.finish_reason, stopped.stop) == ("stop", stop_string)
    assert len(stopped.token_ids) < 8


async def test_weaver_sampler_returns_nan_for_unknown_logprobs(
    create_engine: CreateEngine, trained_artifact: Artifact
) -> None:
    """Greedy replies are scored in a second request. Other replies from a modified distribution are not."""
    engine = create_engine()
    await engine.load(Policy("p", 1, trained_artifact))
    greedy = await sample_reply(engine, temperature=0)
    assert greedy.behavior_logprobs == [0.0] * len(greedy.token_ids)
    assert all(math.isfinite(value) and value < 0 for value in greedy.logprobs)
    tempered = await sample_reply(engine, temperature=0.5)
    assert all(math.isnan(value) for value in tempered.logprobs)
    assert tempered.behavior_logprobs is not None
    assert all(math.isnan(value) for value in tempered.behavior_logprobs)


async def test_weaver_sampler_rejects_invalid_requests_and_requests_after_close(
    create_engine: CreateEngine,
) -> None:
    engine = create_engine()
    with pytest.raises(PromptTooLong):
        await anext(engine.generate([5] * 256, SamplingParams()))
    with pytest.raises(EngineError, match="adapter"):
        await engine.load(Policy("p", 1, Artifact("adapter", "/missing")))
    missing = Artifact("remote", "weaver://model-1/samplers/missing")
    with pytest.raises(EngineError, match="missing"):
        await engine.load(Policy("p", 1, missing))
    assert (await engine.status()).version == 0
    await engine.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        await sample_reply(engine)


async def test_weaver_sampler_reconnects_after_a_server_restart(
    create_engine: CreateEngine, model: ModelConfig, tmp_path: Path
) -> None:
    options = {"folder": tmp_path, "keys": [API_KEY], "base_model": "tiny"}
    with ExitStack() as stack:
        server_url = stack.enter_context(serve_in_thread("weaver", model, **options))
        engine = create_engine(server_url, deadline=10)
        before = await sample_reply(engine)
        await asyncio.to_thread(stack.close)
        reply_task = asyncio.ensure_future(sample_reply(engine))
        port = int(server_url.rpartition(":")[2])
        await asyncio.to_thread(stack.enter_context, serve_in_thread("weaver", model, port=port, **options))
        assert (await reply_task).token_ids == before.token_ids
        await asyncio.to_thread(stack.close)
    unreachable = create_engine(server_url, deadline=0.5)
    with pytest.raises(EngineUnavailable) as caught:
        await sample_reply(unreachable)
    assert API_KEY not in str(caught.value)
