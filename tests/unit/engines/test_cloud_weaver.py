"""The engine that samples at Weaver, through the real SDK, on a server that really samples."""

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
    LossConfig,
    ModelConfig,
    WeaverBackendConfig,
)
from instar.conformance.batches import tree_samples
from instar.engines.base import Engine
from instar.engines.cloud.weaver import WeaverSampler
from instar.engines.local.engine import LocalEngine
from instar.errors import EngineError, EngineUnavailable, PromptTooLong
from instar.types import Artifact, Policy, SamplingParams, TokenChunk
from tests.tiny import make_tiny_tokenizer
from tests.unit.protocol.serving import served

KEY = "sk-weaver-test"
TOKENIZER = make_tiny_tokenizer()
PROMPT = TOKENIZER.encode("What is 615 plus 278?")
Make = Callable[..., WeaverSampler]


@pytest.fixture(scope="module")
def model(tiny: Path) -> ModelConfig:
    return ModelConfig(name=str(tiny), dtype="fp32", device="cpu", max_context=256)


@pytest.fixture(scope="module")
def url(model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    folder = tmp_path_factory.mktemp("checkpoints")
    with served("weaver", model, folder=folder, keys=[KEY], base_model="tiny") as address:
        yield address


@pytest.fixture(scope="module")
def trained(model: ModelConfig, url: str) -> Artifact:
    """A policy that has moved away from the base model."""

    async def publish() -> Artifact:
        backend = WeaverBackend(model, section(url))
        await backend.start()
        await backend.forward_backward(tree_samples(), LossConfig())
        await backend.optim_step(AdamConfig(lr=0.05))
        artifact = await backend.publish(Path("v000001"))
        await backend.close()
        return artifact

    return asyncio.run(publish())


def section(url: str, **changes: object) -> WeaverBackendConfig:
    given = {"base_url": url, "api_key": KEY, "base_model": "tiny", "deadline": 30.0, **changes}
    return WeaverBackendConfig.model_validate(given)


@pytest.fixture
async def make(model: ModelConfig, url: str) -> AsyncGenerator[Make]:
    made: list[WeaverSampler] = []

    def build(address: str = url, **changes: object) -> WeaverSampler:
        made.append(WeaverSampler(model, section(address, **changes), CloudEngineConfig()))
        return made[-1]

    yield build
    for engine in made:
        await engine.close()


async def reply(engine: Engine, **params: object) -> TokenChunk:
    given = SamplingParams(**{"max_tokens": 12, "seed": 7, **params})  # type: ignore[arg-type]
    (chunk,) = [chunk async for chunk in engine.generate(PROMPT, given)]
    return chunk


async def test_weaver_sampler_matches_the_local_engine(make: Make, model: ModelConfig) -> None:
    engine, local = make(), LocalEngine(model, LocalEngineConfig(threads=1))
    assert not engine.info.streams
    assert not engine.info.versions_per_token
    chunk = await reply(engine)
    chunks = [c async for c in local.generate(PROMPT, SamplingParams(max_tokens=12, seed=7))]
    assert chunk.token_ids == [token for c in chunks for token in c.token_ids]
    np.testing.assert_allclose(chunk.logprobs, [x for c in chunks for x in c.logprobs], atol=1e-5)
    assert chunk.versions == [0] * len(chunk.token_ids)
    assert chunk.behavior_logprobs is None
    assert (await engine.status()).generated_tokens == len(chunk.token_ids)
    await local.close()


async def test_weaver_sampler_finishes_requests_under_their_version(make: Make, trained: Artifact) -> None:
    engine = make()
    await engine.load(Policy("p", 3, Artifact("base")))
    old = asyncio.ensure_future(reply(engine, max_tokens=150))
    await asyncio.sleep(0)
    assert (await engine.status()).running
    await engine.load(Policy("p", 4, trained))
    new = await reply(engine)
    assert set(new.versions) == {4}
    assert set((await old).versions) == {3}
    base = make()
    assert (await reply(base)).logprobs != new.logprobs


async def test_weaver_sampler_ends_replies_at_length_or_stop(make: Make) -> None:
    engine = make()
    whole = await reply(engine, temperature=0, max_tokens=8)
    assert whole.finish_reason == "length"
    assert len(whole.token_ids) == 8
    third = whole.token_ids[2]
    cut = await reply(engine, temperature=0, max_tokens=8, stop_token_ids=(third,))
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(third) + 1]
    assert (cut.finish_reason, cut.stop) == ("stop", None)
    word = TOKENIZER.decode(whole.token_ids[2:4])
    stopped = await reply(engine, temperature=0, max_tokens=8, stop=(word,))
    assert (stopped.finish_reason, stopped.stop) == ("stop", word)
    assert len(stopped.token_ids) < 8


async def test_weaver_sampler_returns_nan_for_unknown_logprobs(make: Make, trained: Artifact) -> None:
    """A greedy reply can be scored; of another distribution the service's numbers may mean anything."""
    engine = make()
    await engine.load(Policy("p", 1, trained))
    greedy = await reply(engine, temperature=0)
    assert greedy.behavior_logprobs == [0.0] * len(greedy.token_ids)
    assert all(math.isfinite(value) and value < 0 for value in greedy.logprobs)
    cool = await reply(engine, temperature=0.5)
    assert all(math.isnan(value) for value in cool.logprobs)
    assert cool.behavior_logprobs is not None
    assert all(math.isnan(value) for value in cool.behavior_logprobs)


async def test_weaver_sampler_rejects_unsupported_requests(make: Make) -> None:
    engine = make()
    with pytest.raises(PromptTooLong):
        await anext(engine.generate([5] * 256, SamplingParams()))
    with pytest.raises(EngineError, match="adapter"):
        await engine.load(Policy("p", 1, Artifact("adapter", "/nowhere")))
    gone = Artifact("remote", "weaver://model-1/samplers/gone")
    with pytest.raises(EngineError, match="gone"):
        await engine.load(Policy("p", 1, gone))
    assert (await engine.status()).version == 0
    await engine.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        await reply(engine)


async def test_weaver_sampler_reconnects_after_a_server_restart(
    make: Make, model: ModelConfig, tmp_path: Path
) -> None:
    options = {"folder": tmp_path, "keys": [KEY], "base_model": "tiny"}
    with ExitStack() as up:
        address = up.enter_context(served("weaver", model, **options))
        engine = make(address, deadline=10)
        before = await reply(engine)
        await asyncio.to_thread(up.close)
        waiting = asyncio.ensure_future(reply(engine))
        port = int(address.rpartition(":")[2])
        await asyncio.to_thread(up.enter_context, served("weaver", model, port=port, **options))
        assert (await waiting).token_ids == before.token_ids
        await asyncio.to_thread(up.close)
    patient = make(address, deadline=0.5)
    with pytest.raises(EngineUnavailable) as caught:
        await reply(patient)
    assert KEY not in str(caught.value)
