"""Weaver's backend through the real SDK, on a server that really trains."""

from __future__ import annotations

import asyncio
import gc
import json
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from instar.backends.local.backend import LocalBackend
from instar.backends.weaver import WeaverBackend
from instar.clouds.base import SERVICES
from instar.config import (
    AdamConfig,
    CloudEngineConfig,
    LocalBackendConfig,
    LossConfig,
    ModelConfig,
    WeaverBackendConfig,
)
from instar.conformance.batches import make_sample, tree_samples
from instar.engines.cloud.weaver import WeaverSampler
from instar.errors import BackendError, BackendLost, BackendUnavailable, ConfigError, NonFiniteError
from instar.protocol.base import ServiceLimits
from instar.types import Policy, Sample, SamplingParams
from tests.unit.protocol.serving import served

KEY = "sk-weaver-test"
ADAM = AdamConfig(lr=0.01, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.5)
Make = Callable[..., WeaverBackend]


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ModelConfig:
    return ModelConfig(name=str(model_folder), dtype="fp32", device="cpu", max_context=256)


@pytest.fixture(scope="module")
def url(model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    folder = tmp_path_factory.mktemp("checkpoints")
    limits = ServiceLimits(max_models=64)  # closing a backend leaves its model there
    with served("weaver", model, folder=folder, keys=[KEY], base_model="tiny", limits=limits) as address:
        yield address


def section(url: str, **changes: object) -> WeaverBackendConfig:
    given = {"base_url": url, "api_key": KEY, "base_model": "tiny", "deadline": 30.0, **changes}
    return WeaverBackendConfig.model_validate(given)


@pytest.fixture
async def make(model: ModelConfig, url: str) -> AsyncGenerator[Make]:
    made: list[WeaverBackend] = []

    def build(address: str = url, **changes: object) -> WeaverBackend:
        made.append(WeaverBackend(model, section(address, **changes), seed=3))
        return made[-1]

    yield build
    for backend in made:
        await backend.close()


async def step(backend: WeaverBackend | LocalBackend, number: int = 0) -> float:
    done, _ = await asyncio.gather(
        backend.forward_backward(tree_samples(number), LossConfig()), backend.optim_step(ADAM)
    )
    return done.loss


def zero_advantages(sample: Sample) -> Sample:
    return make_sample("still", sample.token_ids.tolist(), 5, advantages=np.zeros(len(sample), np.float32))


async def test_it_trains_as_the_local_backend_does(make: Make, model: ModelConfig, tmp_path: Path) -> None:
    far, here = make(), LocalBackend(model, LocalBackendConfig(threads=1), seed=3)
    await far.start()
    samples = [*tree_samples(1), zero_advantages(tree_samples(2)[0]), make_sample("one", [5], 1)]
    for number in range(2):
        for backend in (far, here):
            await step(backend, number)
    found, wanted = [await backend.forward_backward(samples, LossConfig()) for backend in (far, here)]
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
    shared = wanted.metrics.keys() - {"distinct_tokens", "micro_batches"}
    assert {k: found.metrics[k] for k in shared} == pytest.approx({k: wanted.metrics[k] for k in shared})
    for x, y in zip(found.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_array_equal(x, y)
    moved, wanted_step = [await backend.optim_step(ADAM) for backend in (far, here)]
    assert moved.grad_norm == pytest.approx(wanted_step.grad_norm, rel=1e-6)
    assert moved.metrics == wanted_step.metrics
    for x, y in zip(await far.forward(samples), await here.forward(samples), strict=True):
        np.testing.assert_array_equal(x, y)
    await here.close()


@pytest.mark.parametrize("transport", [None, "default", "http-binary"])
async def test_tensors_go_as_bytes_unless_the_environment_says_otherwise(
    make: Make, monkeypatch: pytest.MonkeyPatch, transport: str | None
) -> None:
    if transport is not None:
        monkeypatch.setenv("WEAVER_TENSOR_TRANSPORT", transport)
    backend, usual = make(), make()
    await backend.start()
    model = await backend._get_model()
    assert model.service.tensor_transport == (transport or "http-binary")
    found = await backend.forward_backward(tree_samples(), LossConfig())
    monkeypatch.delenv("WEAVER_TENSOR_TRANSPORT", raising=False)
    await usual.start()
    wanted = await usual.forward_backward(tree_samples(), LossConfig())
    assert found.loss == wanted.loss
    for x, y in zip(found.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_array_equal(x, y)


async def test_a_transport_that_there_is_not_is_said_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEAVER_TENSOR_TRANSPORT", "carrier-pigeon")
    with pytest.raises(ConfigError, match=r"WEAVER_TENSOR_TRANSPORT.*'carrier-pigeon'"):
        await make().start()


async def test_the_base_model_stays_at_hand(make: Make) -> None:
    backend = make()
    await backend.start()
    samples = [*tree_samples()[:3], make_sample("one", [5], 1)]
    before = await backend.forward(samples)  # a fresh adapter changes nothing
    await step(backend)
    for x, y in zip(before, await backend.reference_logprobs(samples), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


async def test_a_state_is_continued_in_another_session(make: Make, tmp_path: Path) -> None:
    first, second = make(), make()
    await first.start()
    await step(first, 0)
    await first.save_state(tmp_path / "state")
    told = json.loads((tmp_path / "state" / "state.json").read_text())
    assert told["path"].startswith("weaver://")
    assert KEY not in (tmp_path / "state" / "state.json").read_text()
    await second.load_state(tmp_path / "state", optimizer=False)
    for x, y in zip(await first.forward(tree_samples()), await second.forward(tree_samples()), strict=True):
        np.testing.assert_array_equal(x, y)
    await second.load_state(tmp_path / "state")
    assert await step(first, 1) == await step(second, 1)
    after = [await backend.forward(tree_samples()) for backend in (first, second)]
    for x, y in zip(*after, strict=True):
        np.testing.assert_array_equal(x, y)


async def test_a_state_of_elsewhere_is_refused(make: Make, tmp_path: Path) -> None:
    backend = make()
    with pytest.raises(BackendError, match="does not contain a saved state"):
        await backend.load_state(tmp_path / "nothing")
    await backend.start()
    await backend.save_state(tmp_path / "state")
    other = make(rank=4)
    with pytest.raises(BackendError, match="rank 16, not 4"):
        await other.load_state(tmp_path / "state")
    file = tmp_path / "state" / "state.json"
    file.write_text(file.read_text().replace("/state-", "/gone-"))
    with pytest.raises(BackendError, match="no longer exists") as caught:
        await backend.load_state(tmp_path / "state")
    assert not isinstance(caught.value, BackendLost)
    # And nothing is trained from scratch in its stead.
    with pytest.raises(BackendLost, match="no training session"):
        await backend.forward(tree_samples())


async def test_what_is_published_is_sampled_from(
    make: Make, model: ModelConfig, url: str, tmp_path: Path
) -> None:
    """With nothing held but the backend."""
    backend = make(sampler_ttl=100)
    await backend.start()
    gc.collect()
    await step(backend)
    gc.collect()
    artifact, again = [await backend.publish(tmp_path / "v000001") for _ in range(2)]
    assert artifact.kind == "remote"
    assert artifact.path != again.path
    assert artifact.expires_at is not None
    engine = WeaverSampler(model, section(url), CloudEngineConfig())
    await engine.load(Policy("p", 1, again))
    prompt = tree_samples()[0].token_ids[:20]
    (chunk,) = [c async for c in engine.generate(prompt, SamplingParams(max_tokens=12, seed=1))]
    await engine.close()
    (scored,) = await backend.forward([make_sample("s", [*prompt.tolist(), *chunk.token_ids], 20)])
    np.testing.assert_allclose(scored[20:], chunk.logprobs, atol=1e-4)


async def test_closing_lets_the_model_be(make: Make, url: str) -> None:
    backend = make()
    await backend.start()
    model_id = backend.model_id
    assert status(url, f"/models/{model_id}") == 200
    await backend.close()
    assert status(url, f"/models/{model_id}") == 200
    with pytest.raises(BackendError, match="closed"):
        await backend.forward(tree_samples())


async def test_a_session_that_is_given_up_is_ended(make: Make, url: str) -> None:
    backend = make()
    await backend.start()
    before = backend.model_id
    await backend.start()
    assert backend.model_id != before
    assert await asyncio.to_thread(status, url, f"/models/{before}") == 404


def status(url: str, path: str) -> int:
    request = urllib.request.Request(f"{url}/api/v1{path}", headers={"X-WEAVER-API-KEY": KEY})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


async def test_refusals_leave_the_session_as_it_was(make: Make) -> None:
    backend = make()
    await backend.start()
    with pytest.raises(BackendError, match="gradient"):
        await backend.optim_step(ADAM)
    with pytest.raises(BackendError, match="999999"):
        await backend.forward([make_sample("unknown", [4, 999999], 1)])
    far = make_sample("far", [4, 5, 6, 7], 2, logprobs=np.full(4, -1000, np.float32))
    with pytest.raises(NonFiniteError):
        await backend.forward_backward([far], LossConfig())
    with pytest.raises(BackendError, match="gradient"):
        await backend.optim_step(ADAM)
    assert np.isfinite(await step(backend))


async def test_an_unknown_key_or_model_is_said_so(make: Make) -> None:
    with pytest.raises(ConfigError, match=SERVICES["weaver"].key_env) as caught:
        await make(api_key="sk-wrong").start()
    assert "sk-wrong" not in str(caught.value)
    with pytest.raises(BackendError, match="nowhere") as refused:
        await make(base_model="nowhere").start()
    assert not isinstance(refused.value, BackendLost)


async def test_a_server_that_comes_back_has_lost_the_session(
    make: Make, model: ModelConfig, tmp_path: Path
) -> None:
    """What was saved is there; what was sent before is not done twice, and what waited behind is not sent."""
    options = {"folder": tmp_path / "checkpoints", "keys": [KEY], "base_model": "tiny"}
    with ExitStack() as up:
        address = up.enter_context(served("weaver", model, **options))
        backend = make(address, deadline=20)
        await backend.start()
        await step(backend, 0)
        await backend.save_state(tmp_path / "state")
        expected = await step(backend, 1)
        await asyncio.to_thread(up.close)
        port = int(address.rpartition(":")[2])
        issued = [asyncio.ensure_future(backend.forward_backward(tree_samples(2), LossConfig()))]
        issued.append(asyncio.ensure_future(backend.optim_step(ADAM)))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(up.enter_context, served("weaver", model, port=port, **options))
        results = await asyncio.gather(*issued, return_exceptions=True)
        assert all(isinstance(result, BackendLost) for result in results), results
        await backend.load_state(tmp_path / "state")
        assert await step(backend, 1) == expected


async def test_a_server_that_stays_away_is_given_up(make: Make, model: ModelConfig, tmp_path: Path) -> None:
    with ExitStack() as up:
        options = {"folder": tmp_path, "keys": [KEY], "base_model": "tiny"}
        backend = make(up.enter_context(served("weaver", model, **options)), deadline=10)
        await backend.start()
        await asyncio.to_thread(up.close)
        results = await asyncio.gather(
            backend.forward_backward(tree_samples(), LossConfig()),
            backend.optim_step(ADAM),
            backend.reference_logprobs(tree_samples()),
            return_exceptions=True,
        )
    assert [type(result) for result in results] == [BackendUnavailable, BackendLost, BackendUnavailable]
