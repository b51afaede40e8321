"""Tests for the Tinker backend with the real SDK and a local protocol server."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import re
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.backends.base import Backend
from instar.backends.tinker import MintBackend, TinkerBackend
from instar.clouds.base import CloudError
from instar.config import LossConfig, MintBackendConfig, ModelConfig, TinkerBackendConfig
from instar.conformance.batches import make_sample, make_tree_samples
from instar.conformance.cases import LOSS
from instar.errors import BackendError, BackendLost, BackendUnavailable, ConfigError
from instar.protocol.base import ServiceLimits
from instar.types import Artifact
from tests.sdk_leaks import IGNORE_SDK_LEAKS, collect_sdk_leaks
from tests.unit.backends.conformance import ADAM, BackendConformance, start_backend
from tests.unit.protocol.serving import serve_in_thread

KEY = "tml-test-key"
pytestmark = IGNORE_SDK_LEAKS


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ModelConfig:
    return ModelConfig(name=str(model_folder), dtype="fp32", device="cpu", max_context=256)


@pytest.fixture(scope="module")
def server_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the server stores saved states."""
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def url(model: ModelConfig, server_folder: Path) -> Generator[str]:
    # The limit is high, because the server keeps the models of closed backends until their sessions expire.
    with (
        collect_sdk_leaks(),
        serve_in_thread(
            "tinker", model, folder=server_folder, keys=[KEY], limits=ServiceLimits(max_models=64)
        ) as address,
    ):
        yield address


def make_config(url: str, **overrides: Any) -> TinkerBackendConfig:
    return TinkerBackendConfig(**({"base_url": url, "api_key": KEY, "rank": 8, "deadline": 60} | overrides))


@pytest.fixture
def make_backend(model: ModelConfig, url: str) -> Callable[[], Backend]:
    return lambda: TinkerBackend(model, make_config(url), seed=5)


async def save_on_service(backend: Backend, folder: Path) -> str:
    """Save the backend's state, and return its path on the service."""
    await backend.save_state(folder / "state")
    return json.loads((folder / "state" / "state.json").read_text())["state"]


class TestConformance(BackendConformance):
    names_non_finite_samples = False
    adapter_has_optimizer_state = True
    server_folder: Path
    # `instar backends check tinker`, which tests/integration/backends runs, covers these tests.
    test_published_adapter_reproduces_backend_logprobs = None
    test_optim_step_matches_adamw = None
    test_two_forward_backward_calls_accumulate_the_same_gradient_as_one = None
    test_load_state_without_optimizer_restores_weights = None
    test_backend_accepts_pipelined_calls = None

    @pytest.fixture
    def make_backend(self, model: ModelConfig, url: str, server_folder: Path) -> Callable[[], Backend]:
        self.server_folder = server_folder
        return lambda: TinkerBackend(model, make_config(url), seed=5)

    async def save_adapter(self, backend: Backend, folder: Path) -> str:
        return await save_on_service(backend, folder)

    def get_adapter_folder(self, artifact: Artifact) -> Path:
        assert artifact.kind == "remote"
        return self.server_folder / artifact.path.removeprefix("tinker://") / "adapter"


async def test_tinker_samples_without_trained_tokens_are_handled_locally(
    make_backend: Callable[[], Backend],
) -> None:
    backend = await start_backend(make_backend)
    single_token, untrained = make_sample("single", [7], 1), make_sample("untrained", [7, 8, 9], 3)
    result = await backend.forward_backward([single_token, untrained], LOSS)
    assert result.loss == 0
    assert [len(logprobs) for logprobs in result.logprobs] == [1, 3]
    assert all(np.isnan(logprobs).all() for logprobs in result.logprobs)
    with pytest.raises(BackendError, match="gradient"):
        await backend.optim_step(ADAM)
    short_logprobs, long_logprobs = await backend.forward([single_token, untrained])
    assert np.isnan(short_logprobs).all()
    assert np.isfinite(long_logprobs[1:]).all()
    assert await backend.forward([]) == []
    await backend.close()


async def test_tinker_dro_does_not_move_untrained_tokens(make_backend: Callable[[], Backend]) -> None:
    """The protocol has no mask, so the backend must keep the dro penalty of untrained tokens at zero."""
    backend = await start_backend(make_backend)
    mask = np.zeros(40, np.float32)
    mask[-1] = 1
    sample = make_sample("one", list(range(3, 43)), 39, mask=mask, advantages=np.zeros(40, np.float32))
    (before,) = await backend.forward([sample])
    on_policy = make_sample(
        "one", list(range(3, 43)), 39, mask=mask, advantages=sample.advantages, logprobs=before
    )
    await backend.forward_backward([on_policy], LossConfig(name="dro", beta=1.0))
    assert (await backend.optim_step(ADAM)).grad_norm < 1e-4
    await backend.close()


async def test_tinker_fractional_mask_scales_loss(make_backend: Callable[[], Backend]) -> None:
    full = make_sample("full", [4, 5, 6, 7, 8], 2)
    half = make_sample("half", [4, 5, 6, 7, 8], 2, mask=full.mask / 2, logprobs=full.logprobs)
    backend = await start_backend(make_backend)
    for name in ("cross_entropy", "importance_sampling", "ppo"):
        loss = LossConfig(name=name)
        full_result, half_result = [await backend.forward_backward([s], loss) for s in (full, half)]
        assert half_result.loss == pytest.approx(full_result.loss / 2)
    with pytest.raises(BackendError, match=r"half.*mask"):
        await backend.forward_backward([half], LossConfig(name="dro"))
    await backend.close()


async def test_tinker_state_file_names_service_path_and_is_checked_on_load(
    make_backend: Callable[[], Backend], model: ModelConfig, url: str, tmp_path: Path
) -> None:
    backend = await start_backend(make_backend)
    await backend.save_state(tmp_path / "state")
    saved_state = json.loads((tmp_path / "state" / "state.json").read_text())
    assert saved_state["state"].startswith("tinker://")
    assert (saved_state["service"], saved_state["rank"], saved_state["base_model"]) == (
        "tinker",
        8,
        model.name,
    )
    assert KEY not in json.dumps(saved_state)
    await backend.close()

    rank_4 = TinkerBackend(model, make_config(url, rank=4))
    with pytest.raises(BackendError, match="saved with rank 8, but this backend has rank 4"):
        await rank_4.load_state(tmp_path / "state")
    with pytest.raises(BackendError, match=r"state\.json is missing or invalid"):
        await rank_4.load_state(tmp_path)
    saved_state["state"] = "tinker://missing-model/weights/missing-state"
    (tmp_path / "state" / "state.json").write_text(json.dumps(saved_state))
    with pytest.raises(BackendError, match="missing-state") as error:
        await make_tinker_backend(model, url).load_state(tmp_path / "state")
    assert not isinstance(error.value, BackendLost)


def make_tinker_backend(model: ModelConfig, url: str, **overrides: Any) -> TinkerBackend:
    return TinkerBackend(model, make_config(url, **overrides), seed=5)


async def test_tinker_adapter_with_another_rank_or_base_model_raises_config_error(
    model: ModelConfig, make_backend: Callable[[], Backend], url: str, tmp_path: Path
) -> None:
    backend = await start_backend(make_backend)
    source = await save_on_service(backend, tmp_path)
    await backend.close()
    rank_4 = make_tinker_backend(model, url, rank=4)
    with pytest.raises(ConfigError, match=r"backend\.rank: got 4, but .* has rank 8; set backend\.rank to 8"):
        await rank_4.load_adapter(source)
    await rank_4.close()
    other_model = make_tinker_backend(model, url, base_model="other")
    with pytest.raises(ConfigError, match=r"this run trains 'other'; set backend\.base_model to"):
        await other_model.load_adapter(source)
    await other_model.close()


async def test_tinker_adapter_that_is_a_sampler_is_rejected(make_backend: Callable[[], Backend]) -> None:
    first, second = await start_backend(make_backend), make_backend()
    sampler = await first.publish(Path("v1"))
    with pytest.raises(BackendError, match=re.escape(f"model.adapter: cannot load {sampler.path}")):
        await second.load_adapter(sampler.path)
    await first.close()
    await second.close()


async def test_tinker_saved_state_survives_close(make_backend: Callable[[], Backend], tmp_path: Path) -> None:
    first = await start_backend(make_backend)
    await first.forward_backward(make_tree_samples(), LOSS)
    await first.optim_step(ADAM)
    await first.save_state(tmp_path / "state")
    expected = await first.forward(make_tree_samples())
    await first.close()
    second = make_backend()
    await second.load_state(tmp_path / "state")
    for x, y in zip(expected, await second.forward(make_tree_samples()), strict=True):
        np.testing.assert_array_equal(x, y)
    await second.close()


async def test_tinker_session_survives_garbage_collection(make_backend: Callable[[], Backend]) -> None:
    backend = await start_backend(make_backend)
    gc.collect()
    await asyncio.sleep(0.1)
    gc.collect()
    assert math.isfinite((await backend.forward_backward(make_tree_samples(), LOSS)).loss)
    assert math.isfinite((await backend.reference_logprobs(make_tree_samples()))[0][-1])
    await backend.close()


async def test_tinker_calls_before_start_or_after_cancellation_raise_backend_lost(
    make_backend: Callable[[], Backend], tmp_path: Path
) -> None:
    backend = make_backend()
    with pytest.raises(BackendLost, match="start"):
        await backend.forward(make_tree_samples())
    await backend.start()
    unsent_call = asyncio.create_task(backend.forward_backward(make_tree_samples(), LOSS))
    await asyncio.sleep(0)
    unsent_call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unsent_call
    await backend.save_state(tmp_path / "unsent")  # the call was cancelled before it was sent
    sent_call = asyncio.create_task(backend.forward_backward(make_tree_samples(), LOSS))
    await asyncio.sleep(0.02)
    sent_call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sent_call
    with pytest.raises(BackendLost, match="was cancelled"):
        await backend.optim_step(ADAM)
    await backend.start()
    await backend.forward(make_tree_samples())
    await backend.close()


async def test_tinker_restarted_server_raises_backend_lost_until_state_is_loaded(
    model: ModelConfig, tmp_path: Path
) -> None:
    with (
        collect_sdk_leaks(),
        serve_in_thread("tinker", model, folder=tmp_path / "server", keys=[KEY]) as address,
    ):
        backend = make_tinker_backend(model, address, deadline=30)
        await backend.start()
        await backend.forward_backward(make_tree_samples(), LOSS)
        await backend.save_state(tmp_path / "state")
        before = await backend.forward(make_tree_samples())
    port = int(address.rsplit(":", 1)[1])
    with (
        collect_sdk_leaks(),
        serve_in_thread("tinker", model, folder=tmp_path / "server", keys=[KEY], port=port),
    ):
        with pytest.raises(BackendLost):
            await backend.optim_step(ADAM)
        with pytest.raises(BackendLost):
            await backend.forward(make_tree_samples())
        await backend.load_state(tmp_path / "state")
        for x, y in zip(before, await backend.forward(make_tree_samples()), strict=True):
            np.testing.assert_array_equal(x, y)
        await backend.close()


async def test_tinker_unreachable_service_times_out(model: ModelConfig) -> None:
    backend = make_tinker_backend(model, "http://127.0.0.1:9", deadline=1)
    async with asyncio.timeout(30):
        with pytest.raises(BackendUnavailable, match="longer than 1 s") as error:
            await backend.start()
    assert KEY not in str(error.value)
    await backend.close()


async def test_tinker_stopped_service_times_out(model: ModelConfig, tmp_path: Path) -> None:
    with (
        collect_sdk_leaks(),
        serve_in_thread("tinker", model, folder=tmp_path / "server", keys=[KEY]) as address,
    ):
        backend = make_tinker_backend(model, address, deadline=30)
        await backend.start()
    # The SDK would retry for minutes, because the server has stopped. So the test shortens the timeout.
    connection = backend._session.connection  # type: ignore[union-attr]
    connection.access = replace(connection.access, call_timeout=1.0)
    pass_error, step_error = await asyncio.gather(
        backend.forward_backward(make_tree_samples(), LOSS),
        backend.optim_step(ADAM),
        return_exceptions=True,
    )
    assert isinstance(pass_error, BackendUnavailable)
    assert isinstance(step_error, BackendLost)
    await backend.close()


async def test_tinker_wrong_key_error_names_the_variable(model: ModelConfig, url: str) -> None:
    for key in ("tml-wrong", "other-key-format"):
        with pytest.raises(ConfigError, match="TINKER_API_KEY") as error:
            await make_tinker_backend(model, url, api_key=key).start()
        assert key not in str(error.value)


async def test_tinker_unknown_base_model_is_rejected(model: ModelConfig, url: str) -> None:
    with pytest.raises(BackendError, match="another-model"):
        await make_tinker_backend(model, url, base_model="another-model").start()


async def test_mint_with_newer_tinker_raises_config_error(model: ModelConfig, url: str) -> None:
    backend = MintBackend(model, MintBackendConfig(base_url=url, api_key="sk-mint-x"))
    with pytest.raises(ConfigError, match=r"older.*backend\.python"):
        await backend.start()


def test_cloud_error_maps_to_backend_error() -> None:
    assert isinstance(CloudError("lost", "x").to_backend_error(), BackendLost)
    assert isinstance(CloudError("unavailable", "x").to_backend_error(), BackendUnavailable)
    assert isinstance(CloudError("settings", "x").to_backend_error(), ConfigError)


async def test_tinker_discard_state_deletes_the_state_from_the_service(
    make_backend: Callable[[], Backend], server_folder: Path, tmp_path: Path
) -> None:
    backend = await start_backend(make_backend)
    for name in ("old", "new"):
        await backend.save_state(tmp_path / name)
    folders = {
        name: server_folder
        / json.loads((tmp_path / name / "state.json").read_text())["state"].removeprefix("tinker://")
        for name in ("old", "new")
    }
    assert all(folder.is_dir() for folder in folders.values())
    await backend.discard_state(tmp_path / "old")
    assert not folders["old"].exists()
    assert folders["new"].is_dir()
    with pytest.raises(BackendError, match="deleting"):
        await backend.discard_state(tmp_path / "old")
    await backend.forward(make_tree_samples())
    await backend.close()
