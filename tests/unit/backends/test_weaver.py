"""Tests for the Weaver backend with the real SDK and a local server that trains a model."""

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
    ModelConfig,
    WeaverBackendConfig,
)
from instar.conformance.batches import make_sample, make_tree_samples
from instar.conformance.cases import LOSS
from instar.engines.cloud.weaver import WeaverSampler
from instar.errors import BackendError, BackendLost, BackendUnavailable, ConfigError, NonFiniteError
from instar.protocol.base import ServiceLimits
from instar.types import Policy, Sample, SamplingParams
from tests.unit.protocol.serving import serve_in_thread

KEY = "sk-weaver-test"
ADAM = AdamConfig(lr=0.01, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.5)
MakeBackend = Callable[..., WeaverBackend]


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ModelConfig:
    return ModelConfig(name=str(model_folder), dtype="fp32", device="cpu", max_context=256)


@pytest.fixture(scope="module")
def url(model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    folder = tmp_path_factory.mktemp("checkpoints")
    limits = ServiceLimits(max_models=64)  # the server keeps the models of closed backends
    with serve_in_thread(
        "weaver", model, folder=folder, keys=[KEY], base_model="tiny", limits=limits
    ) as address:
        yield address


def make_config(url: str, **overrides: object) -> WeaverBackendConfig:
    settings = {"base_url": url, "api_key": KEY, "base_model": "tiny", "deadline": 30.0, **overrides}
    return WeaverBackendConfig.model_validate(settings)


@pytest.fixture
async def make_backend(model: ModelConfig, url: str) -> AsyncGenerator[MakeBackend]:
    backends: list[WeaverBackend] = []

    def build(address: str = url, **overrides: object) -> WeaverBackend:
        backends.append(WeaverBackend(model, make_config(address, **overrides), seed=3))
        return backends[-1]

    yield build
    for backend in backends:
        await backend.close()


async def train_step(backend: WeaverBackend | LocalBackend, seed: int = 0) -> float:
    """Train one step on the samples with this seed and return the loss."""
    result, _ = await asyncio.gather(
        backend.forward_backward(make_tree_samples(seed), LOSS), backend.optim_step(ADAM)
    )
    return result.loss


def zero_advantages(sample: Sample) -> Sample:
    return make_sample("zero", sample.token_ids.tolist(), 5, advantages=np.zeros(len(sample), np.float32))


async def test_weaver_trains_like_local_backend(
    make_backend: MakeBackend, model: ModelConfig, tmp_path: Path
) -> None:
    remote, local = make_backend(), LocalBackend(model, LocalBackendConfig(threads=1), seed=3)
    await remote.start()
    samples = [*make_tree_samples(1), zero_advantages(make_tree_samples(2)[0]), make_sample("one", [5], 1)]
    for seed in range(2):
        for backend in (remote, local):
            await train_step(backend, seed)
    actual, expected = [await backend.forward_backward(samples, LOSS) for backend in (remote, local)]
    assert actual.loss == pytest.approx(expected.loss, rel=1e-6)
    metric_names = expected.metrics.keys() - {"distinct_tokens", "micro_batches"}
    for name in metric_names:
        assert actual.metrics[name] == pytest.approx(expected.metrics[name]), name
    for x, y in zip(actual.logprobs, expected.logprobs, strict=True):
        np.testing.assert_array_equal(x, y)
    actual_step, expected_step = [await backend.optim_step(ADAM) for backend in (remote, local)]
    assert actual_step.grad_norm == pytest.approx(expected_step.grad_norm, rel=1e-6)
    assert actual_step.metrics == expected_step.metrics
    for x, y in zip(await remote.forward(samples), await local.forward(samples), strict=True):
        np.testing.assert_array_equal(x, y)
    await local.close()


@pytest.mark.parametrize("transport", [None, "default", "http-binary"])
async def test_weaver_tensor_transport_defaults_to_binary(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch, transport: str | None
) -> None:
    if transport is not None:
        monkeypatch.setenv("WEAVER_TENSOR_TRANSPORT", transport)
    backend, default_backend = make_backend(), make_backend()
    await backend.start()
    model = await backend._get_model()
    assert model.service.tensor_transport == (transport or "http-binary")
    actual = await backend.forward_backward(make_tree_samples(), LOSS)
    monkeypatch.delenv("WEAVER_TENSOR_TRANSPORT", raising=False)
    await default_backend.start()
    expected = await default_backend.forward_backward(make_tree_samples(), LOSS)
    assert actual.loss == expected.loss
    for x, y in zip(actual.logprobs, expected.logprobs, strict=True):
        np.testing.assert_array_equal(x, y)


async def test_weaver_unknown_transport_raises_config_error(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEAVER_TENSOR_TRANSPORT", "unknown")
    with pytest.raises(ConfigError, match=r"'unknown'.*WEAVER_TENSOR_TRANSPORT"):
        await make_backend().start()


async def test_weaver_reference_logprobs_match_base_model(make_backend: MakeBackend) -> None:
    backend = make_backend()
    await backend.start()
    samples = [*make_tree_samples()[:3], make_sample("one", [5], 1)]
    # A new adapter does not change the logprobs, so these are the base model's.
    before = await backend.forward(samples)
    await train_step(backend)
    for x, y in zip(before, await backend.reference_logprobs(samples), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


async def test_weaver_state_continues_in_new_session(make_backend: MakeBackend, tmp_path: Path) -> None:
    first, second = make_backend(), make_backend()
    await first.start()
    await train_step(first, 0)
    await first.save_state(tmp_path / "state")
    saved_state = json.loads((tmp_path / "state" / "state.json").read_text())
    assert saved_state["path"].startswith("weaver://")
    assert KEY not in (tmp_path / "state" / "state.json").read_text()
    await second.load_state(tmp_path / "state", optimizer=False)
    for x, y in zip(
        await first.forward(make_tree_samples()), await second.forward(make_tree_samples()), strict=True
    ):
        np.testing.assert_array_equal(x, y)
    await second.load_state(tmp_path / "state")
    assert await train_step(first, 1) == await train_step(second, 1)
    after = [await backend.forward(make_tree_samples()) for backend in (first, second)]
    for x, y in zip(*after, strict=True):
        np.testing.assert_array_equal(x, y)


async def test_weaver_adapter_continues_with_its_optimizer_state(
    make_backend: MakeBackend, tmp_path: Path
) -> None:
    first, second = make_backend(), make_backend()
    await first.start()
    await train_step(first)
    await first.save_state(tmp_path / "state")
    await second.load_adapter(json.loads((tmp_path / "state" / "state.json").read_text())["path"])
    losses = [[await train_step(backend, seed) for seed in (1, 2)] for backend in (first, second)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


async def test_weaver_adapter_without_optimizer_state_is_loaded(make_backend: MakeBackend) -> None:
    first, second = make_backend(), make_backend()
    await first.start()
    await train_step(first)
    model = await first._get_model()
    saved = await model.call_exclusively(
        "save_state", lambda: model.client.save_state(name="weights", checkpoint_type="weight")
    )
    await second.load_adapter(saved.path)
    losses = [[await train_step(backend, seed) for seed in (1, 2)] for backend in (first, second)]
    assert losses[1][0] == pytest.approx(losses[0][0], abs=1e-6)
    assert losses[1][1] != pytest.approx(losses[0][1], abs=1e-6)


async def test_weaver_adapter_with_another_rank_is_rejected(
    make_backend: MakeBackend, tmp_path: Path
) -> None:
    first, rank_4 = make_backend(), make_backend(rank=4)
    await first.start()
    await first.save_state(tmp_path / "state")
    with pytest.raises(BackendError, match="check that its rank and its base model match"):
        await rank_4.load_adapter(json.loads((tmp_path / "state" / "state.json").read_text())["path"])


async def test_weaver_load_state_rejects_missing_or_mismatched_state(
    make_backend: MakeBackend, tmp_path: Path
) -> None:
    backend = make_backend()
    with pytest.raises(BackendError, match=r"state\.json is missing or invalid"):
        await backend.load_state(tmp_path / "missing")
    await backend.start()
    await backend.save_state(tmp_path / "state")
    rank_4 = make_backend(rank=4)
    with pytest.raises(BackendError, match="saved with rank 16, but this backend has rank 4"):
        await rank_4.load_state(tmp_path / "state")
    state_path = tmp_path / "state" / "state.json"
    state_path.write_text(state_path.read_text().replace("/state-", "/missing-"))
    with pytest.raises(BackendError, match="no longer exists") as error:
        await backend.load_state(tmp_path / "state")
    assert not isinstance(error.value, BackendLost)
    # The backend does not start from scratch instead.
    with pytest.raises(BackendLost, match="no training session"):
        await backend.forward(make_tree_samples())


async def test_weaver_published_policy_can_be_sampled_after_garbage_collection(
    make_backend: MakeBackend, model: ModelConfig, url: str, tmp_path: Path
) -> None:
    """The backend keeps a reference to its session, so that garbage collection does not end it."""
    backend = make_backend(sampler_ttl=100)
    await backend.start()
    gc.collect()
    await train_step(backend)
    gc.collect()
    artifact, republished = [await backend.publish(tmp_path / "v000001") for _ in range(2)]
    assert artifact.kind == "remote"
    assert artifact.path != republished.path
    assert artifact.expires_at is not None
    engine = WeaverSampler(model, make_config(url), CloudEngineConfig())
    await engine.load(Policy("p", 1, republished))
    prompt = make_tree_samples()[0].token_ids[:20]
    (chunk,) = [c async for c in engine.generate(prompt, SamplingParams(max_tokens=12, seed=1))]
    await engine.close()
    (scored,) = await backend.forward([make_sample("s", [*prompt.tolist(), *chunk.token_ids], 20)])
    np.testing.assert_allclose(scored[20:], chunk.logprobs, atol=1e-4)


async def test_weaver_close_keeps_model_on_the_service(make_backend: MakeBackend, url: str) -> None:
    backend = make_backend()
    await backend.start()
    model_id = (await backend._get_model()).client.model_id
    assert get_status(url, f"/models/{model_id}") == 200
    await backend.close()
    assert get_status(url, f"/models/{model_id}") == 200
    with pytest.raises(BackendError, match="closed"):
        await backend.forward(make_tree_samples())


async def test_weaver_restart_deletes_previous_model(make_backend: MakeBackend, url: str) -> None:
    backend = make_backend()
    await backend.start()
    first_id = (await backend._get_model()).client.model_id
    await backend.start()
    assert (await backend._get_model()).client.model_id != first_id
    assert await asyncio.to_thread(get_status, url, f"/models/{first_id}") == 404


def get_status(url: str, path: str) -> int:
    request = urllib.request.Request(f"{url}/api/v1{path}", headers={"X-WEAVER-API-KEY": KEY})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


async def test_weaver_rejected_calls_keep_session(make_backend: MakeBackend) -> None:
    backend = make_backend()
    await backend.start()
    with pytest.raises(BackendError, match="gradient"):
        await backend.optim_step(ADAM)
    with pytest.raises(BackendError, match="999999"):
        await backend.forward([make_sample("unknown", [4, 999999], 1)])
    non_finite = make_sample("far", [4, 5, 6, 7], 2, logprobs=np.full(4, -1000, np.float32))
    with pytest.raises(NonFiniteError):
        await backend.forward_backward([non_finite], LOSS)
    with pytest.raises(BackendError, match="gradient"):
        await backend.optim_step(ADAM)
    assert np.isfinite(await train_step(backend))


async def test_weaver_errors_name_key_variable_and_unknown_model(make_backend: MakeBackend) -> None:
    with pytest.raises(ConfigError, match=SERVICES["weaver"].key_env) as error:
        await make_backend(api_key="sk-wrong").start()
    assert "sk-wrong" not in str(error.value)
    with pytest.raises(BackendError, match="unknown-model") as model_error:
        await make_backend(base_model="unknown-model").start()
    assert not isinstance(model_error.value, BackendLost)


async def test_weaver_restarted_server_raises_backend_lost(
    make_backend: MakeBackend, model: ModelConfig, tmp_path: Path
) -> None:
    """The running and the queued call are lost, and the saved state can still be loaded."""
    options = {"folder": tmp_path / "checkpoints", "keys": [KEY], "base_model": "tiny"}
    with ExitStack() as servers:
        address = servers.enter_context(serve_in_thread("weaver", model, **options))
        backend = make_backend(address, deadline=20)
        await backend.start()
        await train_step(backend, 0)
        await backend.save_state(tmp_path / "state")
        expected = await train_step(backend, 1)
        await asyncio.to_thread(servers.close)
        port = int(address.rpartition(":")[2])
        calls = [asyncio.ensure_future(backend.forward_backward(make_tree_samples(2), LOSS))]
        calls.append(asyncio.ensure_future(backend.optim_step(ADAM)))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(servers.enter_context, serve_in_thread("weaver", model, port=port, **options))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, BackendLost) for result in results), results
        await backend.load_state(tmp_path / "state")
        assert await train_step(backend, 1) == expected


async def test_weaver_unreachable_server_times_out(
    make_backend: MakeBackend, model: ModelConfig, tmp_path: Path
) -> None:
    with ExitStack() as servers:
        options = {"folder": tmp_path, "keys": [KEY], "base_model": "tiny"}
        backend = make_backend(
            servers.enter_context(serve_in_thread("weaver", model, **options)), deadline=10
        )
        await backend.start()
        await asyncio.to_thread(servers.close)
        results = await asyncio.gather(
            backend.forward_backward(make_tree_samples(), LOSS),
            backend.optim_step(ADAM),
            backend.reference_logprobs(make_tree_samples()),
            return_exceptions=True,
        )
    assert [type(result) for result in results] == [BackendUnavailable, BackendLost, BackendUnavailable]
