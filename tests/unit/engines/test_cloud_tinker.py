"""Tests for the Tinker sampler with the real SDK, against a local server that implements its protocol."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.backends.tinker import TinkerBackend
from instar.config import AdamConfig, CloudEngineConfig, ModelConfig, TinkerBackendConfig
from instar.conformance.batches import make_sample, make_tree_samples
from instar.conformance.cases import LOSS
from instar.engines.base import Engine
from instar.engines.cloud.tinker import TinkerSampler
from instar.errors import EngineError, EngineUnavailable
from instar.types import Artifact, Policy
from tests.sdk_leaks import IGNORE_SDK_LEAKS, collect_sdk_leaks
from tests.unit.engines.conformance import CloudConformance, collect, get_ids, get_logprobs, get_versions
from tests.unit.protocol.serving import serve_in_thread

API_KEY = "tml-test-key"
PROMPT = [5, 6, 7, 8]
pytestmark = IGNORE_SDK_LEAKS


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ModelConfig:
    return ModelConfig(name=str(tiny_model), dtype="fp32", device="cpu", max_context=256)


@pytest.fixture(scope="module")
def url(model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    with (
        collect_sdk_leaks(),
        serve_in_thread(
            "tinker", model, folder=tmp_path_factory.mktemp("checkpoints"), keys=[API_KEY]
        ) as server_url,
    ):
        yield server_url


def make_backend_config(url: str, **overrides: Any) -> TinkerBackendConfig:
    return TinkerBackendConfig(
        **({"base_url": url, "api_key": API_KEY, "rank": 4, "deadline": 60} | overrides)
    )


@pytest.fixture
async def engine(model: ModelConfig, url: str) -> AsyncGenerator[Engine]:
    sampler = TinkerSampler(model, make_backend_config(url), CloudEngineConfig())
    yield sampler
    await sampler.close()


async def train_and_publish(model: ModelConfig, url: str, path: Path) -> tuple[TinkerBackend, Artifact]:
    backend = TinkerBackend(model, make_backend_config(url), seed=1)
    await backend.start()
    await backend.forward_backward(make_tree_samples(), LOSS)
    await backend.optim_step(AdamConfig(lr=0.05))
    return backend, await backend.publish(path)


@pytest.fixture(scope="module")
def published(model: ModelConfig, url: str) -> list[Artifact]:
    """The artifacts after two training steps."""

    async def publish() -> list[Artifact]:
        backend, first = await train_and_publish(model, url, Path("v000001"))
        await backend.forward_backward(make_tree_samples(), LOSS)
        await backend.optim_step(AdamConfig(lr=0.05))
        second = await backend.publish(Path("v000002"))
        await backend.close()
        return [first, second]

    return asyncio.run(publish())


class TestConformance(CloudConformance):
    @pytest.fixture
    def artifacts(self, published: list[Artifact]) -> list[Artifact]:
        return published


async def test_tinker_sampler_samples_the_published_policy(
    engine: Engine, model: ModelConfig, url: str, tmp_path: Path
) -> None:
    backend, artifact = await train_and_publish(model, url, tmp_path)
    base_chunks = await collect(engine, PROMPT, max_tokens=12, seed=3)
    await engine.load(Policy("p", 1, artifact))
    for params in ({"seed": 3}, {"temperature": 0}):
        (chunk,) = await collect(engine, PROMPT, max_tokens=12, **params)
        assert set(chunk.versions) == {1}
        ids = np.asarray([*PROMPT, *chunk.token_ids], np.int32)
        (scored,) = await backend.forward([make_sample("reply", ids.tolist(), len(PROMPT))])
        np.testing.assert_allclose(chunk.logprobs, scored[len(PROMPT) :], atol=2e-5)
        np.testing.assert_allclose((await engine.logprobs(ids))[1:], scored[1:], atol=2e-5)
    assert get_logprobs(base_chunks) != get_logprobs(await collect(engine, PROMPT, max_tokens=12, seed=3))
    await backend.close()


async def test_tinker_sampler_does_not_change_the_version_during_a_reply(engine: Engine) -> None:
    pending_task = asyncio.create_task(collect(engine, PROMPT, max_tokens=200, seed=3))
    while not (await engine.status()).running:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    await engine.load(Policy("p", 1, Artifact("base")))
    assert len(set(get_versions(await pending_task))) == 1
    assert set(get_versions(await collect(engine, PROMPT, max_tokens=2))) == {1}


async def test_tinker_sampler_rejects_fields_that_the_service_lacks(engine: Engine) -> None:
    fields = {"min_p": 0.1, "presence_penalty": 1.0, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}}
    for name, value in fields.items():
        with pytest.raises(EngineError, match=f"The tinker engine does not support {name}"):
            await collect(engine, PROMPT, max_tokens=4, **{name: value})


async def test_tinker_sampler_returns_nan_for_unknown_logprobs(engine: Engine) -> None:
    (chunk,) = await collect(engine, PROMPT, max_tokens=4, temperature=0.5, seed=1)
    assert all(map(math.isnan, chunk.logprobs))
    assert all(map(math.isnan, chunk.behavior_logprobs or []))
    (greedy,) = await collect(engine, PROMPT, max_tokens=4, temperature=0)
    assert greedy.behavior_logprobs == [0.0] * 4
    assert all(map(math.isfinite, greedy.logprobs))


async def test_tinker_sampler_limits_concurrent_requests(model: ModelConfig, url: str) -> None:
    engine = TinkerSampler(model, make_backend_config(url), CloudEngineConfig(max_in_flight=2))
    tasks = [asyncio.create_task(collect(engine, PROMPT, max_tokens=40, seed=i)) for i in range(6)]
    max_running = 0
    while not all(task.done() for task in tasks):
        max_running = max(max_running, (await engine.status()).running)
        await asyncio.sleep(0.001)
    assert max_running == 2
    assert all(len(get_ids(task.result())) > 0 for task in tasks)
    await engine.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        await collect(engine, PROMPT, max_tokens=1)


async def test_tinker_sampler_reconnects_after_a_server_restart(model: ModelConfig, tmp_path: Path) -> None:
    options: dict[str, Any] = {"folder": tmp_path / "checkpoints", "keys": [API_KEY]}
    with collect_sdk_leaks(), serve_in_thread("tinker", model, **options) as server_url:
        backend, artifact = await train_and_publish(model, server_url, tmp_path)
        await backend.close()
        engine = TinkerSampler(model, make_backend_config(server_url, deadline=20), CloudEngineConfig())
        await engine.load(Policy("p", 1, artifact))
        before = await collect(engine, PROMPT, max_tokens=5, temperature=0)
    with (
        collect_sdk_leaks(),
        serve_in_thread("tinker", model, **options, port=int(server_url.rsplit(":", 1)[1])),
    ):
        after = await collect(engine, PROMPT, max_tokens=5, temperature=0)
        assert (get_ids(before), get_versions(before)) == (get_ids(after), get_versions(after))
        with pytest.raises(EngineError, match="no longer has"):
            await engine.load(Policy("p", 2, Artifact("remote", "tinker://missing/sampler_weights/missing")))
        assert (await engine.status()).version == 1
        assert get_ids(await collect(engine, PROMPT, max_tokens=5, temperature=0)) == get_ids(before)
        await engine.close()


async def test_tinker_sampler_raises_unavailable_if_the_service_is_unreachable(model: ModelConfig) -> None:
    engine = TinkerSampler(model, make_backend_config("http://127.0.0.1:9", deadline=1), CloudEngineConfig())
    async with asyncio.timeout(30):
        with pytest.raises(EngineUnavailable):
            await collect(engine, PROMPT, max_tokens=1)
    await engine.close()
