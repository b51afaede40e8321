"""The Tinker backend through the real SDK, against the served protocol over a socket."""

from __future__ import annotations

import asyncio
import gc
import json
import math
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.backends.base import Backend
from instar.backends.tinker import MintBackend, TinkerBackend
from instar.clouds.errors import CloudError
from instar.config import LossConfig, MintBackendConfig, ModelConfig, TinkerBackendConfig
from instar.conformance.batches import make_sample, tree_samples
from instar.errors import BackendError, BackendLost, BackendUnavailable, ConfigError
from instar.protocol.base import ServiceLimits
from instar.types import Artifact
from tests.sdk_leaks import IGNORE_SDK_LEAKS, collect_sdk_leaks
from tests.unit.backends.conformance import ADAM, BackendConformance, begun
from tests.unit.protocol.serving import served

KEY = "tml-a-key-of-the-tests"
pytestmark = IGNORE_SDK_LEAKS


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ModelConfig:
    return ModelConfig(name=str(model_folder), dtype="fp32", device="cpu", max_context=256)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server keeps what is saved."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def url(model: ModelConfig, kept: Path) -> Generator[str]:
    # A closed backend's model stays until the server misses its session.
    with (
        collect_sdk_leaks(),
        served("tinker", model, folder=kept, keys=[KEY], limits=ServiceLimits(max_models=64)) as address,
    ):
        yield address


def section(url: str, **changes: Any) -> TinkerBackendConfig:
    return TinkerBackendConfig(**({"base_url": url, "api_key": KEY, "rank": 8, "deadline": 60} | changes))


@pytest.fixture
def make_backend(model: ModelConfig, url: str) -> Callable[[], Backend]:
    return lambda: TinkerBackend(model, section(url), seed=5)


class TestConformance(BackendConformance):
    names_samples = False
    kept: Path
    # `instar backends check tinker`, which tests/integration/backends runs, has these.
    test_published_adapter_gives_the_same_logprobs = None
    test_steps_follow_adamw = None
    test_two_calls_accumulate_as_one = None
    test_weights_alone_can_be_loaded = None
    test_calls_may_be_pipelined = None

    @pytest.fixture
    def make_backend(self, model: ModelConfig, url: str, kept: Path) -> Callable[[], Backend]:
        self.kept = kept
        return lambda: TinkerBackend(model, section(url), seed=5)

    def published(self, artifact: Artifact) -> Path:
        assert artifact.kind == "remote"
        return self.kept / artifact.path.removeprefix("tinker://") / "adapter"


async def test_what_has_nothing_to_train_is_answered_here(make_backend: Callable[[], Backend]) -> None:
    backend = await begun(make_backend)
    alone, unmasked = make_sample("alone", [7], 1), make_sample("unmasked", [7, 8, 9], 3)
    done = await backend.forward_backward([alone, unmasked], LossConfig())
    assert done.loss == 0
    assert [len(found) for found in done.logprobs] == [1, 3]
    assert all(np.isnan(found).all() for found in done.logprobs)
    with pytest.raises(BackendError, match="gradient"):
        await backend.optim_step(ADAM)
    (one, three) = await backend.forward([alone, unmasked])
    assert np.isnan(one).all()
    assert np.isfinite(three[1:]).all()
    assert await backend.forward([]) == []
    await backend.close()


async def test_tokens_that_are_not_trained_do_not_move_under_dro(make_backend: Callable[[], Backend]) -> None:
    """The protocol knows no mask, and dro would hold every token to its old logprob."""
    backend = await begun(make_backend)
    mask = np.zeros(40, np.float32)
    mask[-1] = 1
    sample = make_sample("one", list(range(3, 43)), 39, mask=mask, advantages=np.zeros(40, np.float32))
    (before,) = await backend.forward([sample])
    exact = make_sample(
        "one", list(range(3, 43)), 39, mask=mask, advantages=sample.advantages, logprobs=before
    )
    await backend.forward_backward([exact], LossConfig(name="dro", beta=1.0))
    assert (await backend.optim_step(ADAM)).grad_norm < 1e-4
    await backend.close()


async def test_a_mask_is_a_weight(make_backend: Callable[[], Backend]) -> None:
    whole = make_sample("whole", [4, 5, 6, 7, 8], 2)
    half = make_sample("half", [4, 5, 6, 7, 8], 2, mask=whole.mask / 2, logprobs=whole.logprobs)
    backend = await begun(make_backend)
    for name in ("cross_entropy", "importance_sampling", "ppo"):
        one, two = [await backend.forward_backward([s], LossConfig(name=name)) for s in (whole, half)]
        assert two.loss == pytest.approx(one.loss / 2)
    with pytest.raises(BackendError, match=r"half.*mask"):
        await backend.forward_backward([half], LossConfig(name="dro"))
    await backend.close()


async def test_the_state_says_where_the_service_keeps_it(
    make_backend: Callable[[], Backend], model: ModelConfig, url: str, tmp_path: Path
) -> None:
    backend = await begun(make_backend)
    await backend.save_state(tmp_path / "state")
    told = json.loads((tmp_path / "state" / "state.json").read_text())
    assert told["state"].startswith("tinker://")
    assert (told["service"], told["rank"], told["base_model"]) == ("tinker", 8, model.name)
    assert KEY not in json.dumps(told)
    await backend.close()

    other = TinkerBackend(model, section(url, rank=4))
    with pytest.raises(BackendError, match="rank 8, not 4"):
        await other.load_state(tmp_path / "state")
    with pytest.raises(BackendError, match="does not contain a saved state"):
        await other.load_state(tmp_path)
    told["state"] = "tinker://model-that-never-was/weights/gone"
    (tmp_path / "state" / "state.json").write_text(json.dumps(told))
    with pytest.raises(BackendError, match="gone") as caught:
        await backend_of(model, url).load_state(tmp_path / "state")
    assert not isinstance(caught.value, BackendLost)


def backend_of(model: ModelConfig, url: str, **changes: Any) -> TinkerBackend:
    return TinkerBackend(model, section(url, **changes), seed=5)


async def test_closing_does_not_end_what_was_saved(
    make_backend: Callable[[], Backend], tmp_path: Path
) -> None:
    first = await begun(make_backend)
    await first.forward_backward(tree_samples(), LossConfig())
    await first.optim_step(ADAM)
    await first.save_state(tmp_path / "state")
    expected = await first.forward(tree_samples())
    await first.close()
    second = make_backend()
    await second.load_state(tmp_path / "state")
    for x, y in zip(expected, await second.forward(tree_samples()), strict=True):
        np.testing.assert_array_equal(x, y)
    await second.close()


async def test_nothing_but_the_backend_has_to_be_held(make_backend: Callable[[], Backend]) -> None:
    backend = await begun(make_backend)
    gc.collect()
    await asyncio.sleep(0.1)
    gc.collect()
    assert math.isfinite((await backend.forward_backward(tree_samples(), LossConfig())).loss)
    assert math.isfinite((await backend.reference_logprobs(tree_samples()))[0][-1])
    await backend.close()


async def test_a_call_before_the_session_and_after_it_was_lost(
    make_backend: Callable[[], Backend], tmp_path: Path
) -> None:
    backend = make_backend()
    with pytest.raises(BackendLost, match="start"):
        await backend.forward(tree_samples())
    await backend.start()
    waiting = asyncio.create_task(backend.forward_backward(tree_samples(), LossConfig()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await backend.save_state(tmp_path / "unsent")  # it was broken off before it was sent
    sent = asyncio.create_task(backend.forward_backward(tree_samples(), LossConfig()))
    await asyncio.sleep(0.02)
    sent.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sent
    with pytest.raises(BackendLost, match="was cancelled"):
        await backend.optim_step(ADAM)
    await backend.start()
    await backend.forward(tree_samples())
    await backend.close()


async def test_a_server_that_was_restarted_has_lost_the_session(
    model: ModelConfig, kept: Path, tmp_path: Path
) -> None:
    with collect_sdk_leaks(), served("tinker", model, folder=tmp_path / "kept", keys=[KEY]) as first:
        backend = backend_of(model, first, deadline=30)
        await backend.start()
        await backend.forward_backward(tree_samples(), LossConfig())
        await backend.save_state(tmp_path / "state")
        before = await backend.forward(tree_samples())
    port = int(first.rsplit(":", 1)[1])
    with collect_sdk_leaks(), served("tinker", model, folder=tmp_path / "kept", keys=[KEY], port=port):
        with pytest.raises(BackendLost):
            await backend.optim_step(ADAM)
        with pytest.raises(BackendLost):
            await backend.forward(tree_samples())
        await backend.load_state(tmp_path / "state")
        for x, y in zip(before, await backend.forward(tree_samples()), strict=True):
            np.testing.assert_array_equal(x, y)
        await backend.close()


async def test_a_service_that_is_not_there_is_given_up_in_time(model: ModelConfig) -> None:
    backend = backend_of(model, "http://127.0.0.1:9", deadline=1)
    async with asyncio.timeout(5):
        with pytest.raises(BackendUnavailable, match="longer than 1 s") as caught:
            await backend.start()
    assert KEY not in str(caught.value)
    await backend.close()


async def test_a_service_that_stalls_is_given_up_in_time(model: ModelConfig, tmp_path: Path) -> None:
    with collect_sdk_leaks(), served("tinker", model, folder=tmp_path / "kept", keys=[KEY]) as address:
        backend = backend_of(model, address, deadline=30)
        await backend.start()
    # Nothing listens there any more, and the SDK goes on trying for minutes.
    backend._session.connection.access = cut_short(backend._session.connection.access)  # type: ignore[union-attr]
    forward, step = await asyncio.gather(
        backend.forward_backward(tree_samples(), LossConfig()),
        backend.optim_step(ADAM),
        return_exceptions=True,
    )
    assert isinstance(forward, BackendUnavailable)
    assert isinstance(step, BackendLost)
    await backend.close()


def cut_short(access: Any) -> Any:
    from dataclasses import replace

    return replace(access, deadline=1.0)


async def test_a_wrong_key_names_the_variable(model: ModelConfig, url: str) -> None:
    for key in ("tml-wrong", "of-another-kind"):
        with pytest.raises(ConfigError, match="TINKER_API_KEY") as caught:
            await backend_of(model, url, api_key=key).start()
        assert key not in str(caught.value)


async def test_an_unknown_base_model_is_refused(model: ModelConfig, url: str) -> None:
    with pytest.raises(BackendError, match="another-model"):
        await backend_of(model, url, base_model="another-model").start()


async def test_mint_says_why_it_cannot_run_beside_tinker(model: ModelConfig, url: str) -> None:
    backend = MintBackend(model, MintBackendConfig(base_url=url, api_key="sk-mint-x"))
    with pytest.raises(ConfigError, match=r"older.*backend\.python"):
        await backend.start()


def test_a_failure_is_what_can_be_done_about_it() -> None:
    assert isinstance(CloudError("lost", "x").to_backend_error(), BackendLost)
    assert isinstance(CloudError("unavailable", "x").to_backend_error(), BackendUnavailable)
    assert isinstance(CloudError("settings", "x").to_backend_error(), ConfigError)


async def test_a_discarded_state_is_gone_at_the_service(
    make_backend: Callable[[], Backend], kept: Path, tmp_path: Path
) -> None:
    backend = await begun(make_backend)
    for name in ("old", "new"):
        await backend.save_state(tmp_path / name)
    folders = {
        name: kept
        / json.loads((tmp_path / name / "state.json").read_text())["state"].removeprefix("tinker://")
        for name in ("old", "new")
    }
    assert all(folder.is_dir() for folder in folders.values())
    await backend.discard_state(tmp_path / "old")
    assert not folders["old"].exists()
    assert folders["new"].is_dir()
    with pytest.raises(BackendError, match="deleting"):
        await backend.discard_state(tmp_path / "old")
    await backend.forward(tree_samples())
    await backend.close()
