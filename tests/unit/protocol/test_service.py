"""Tests that the service trains and samples like its backend and engine, even with concurrent clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from instar.backends.local.backend import LocalBackend
from instar.backends.local.model import load_base
from instar.backends.local.state import hash_adapter
from instar.config import AdamConfig, LocalBackendConfig, LoraConfig, LossConfig, ModelConfig
from instar.protocol.base import AdapterSpec, CheckpointInfo, ProtocolError, ServiceLimits
from instar.protocol.models import TrainingModel, create_backend
from instar.protocol.service import TrainingService
from instar.types import Floats, SamplingParams
from tests.tiny import make_tiny_model
from tests.unit.backends.conformance import make_sample, make_tree_samples

ADAM = AdamConfig(lr=0.01, weight_decay=0.1)
LOSS = LossConfig(name="importance_sampling")
PROMPT = [9, 40, 41, 42, 43, 44, 45, 46, 47, 9, 12, 300]
OpenService = Callable[..., AbstractAsyncContextManager[TrainingService]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context=256)
    return ModelConfig(name=str(folder), dtype="fp32", device="cpu")


@pytest.fixture
def open_service(model: ModelConfig, tmp_path: Path) -> OpenService:
    """Return a function that opens a service. Calling it again simulates a restart."""

    @asynccontextmanager
    async def open_and_close(**limits: float) -> AsyncGenerator[TrainingService]:
        service = TrainingService(
            model,
            tmp_path / "checkpoints",
            base_model="tiny",
            limits=ServiceLimits(**limits),  # pyright: ignore[reportArgumentType]
            threads=1,
        )
        await service.start()
        try:
            yield service
        finally:
            await service.close()

    return open_and_close


@pytest.fixture
async def service(open_service: OpenService) -> AsyncGenerator[TrainingService]:
    async with open_service() as service:
        yield service


async def create_model(service: TrainingService, owner: str = "me", **adapter: int) -> TrainingModel:
    session = await service.create_session(owner)
    return await service.create_model(session, owner, "tiny", AdapterSpec(**{"rank": 8, "seed": 3} | adapter))


async def train(model: TrainingModel | LocalBackend, steps: int = 3, seed: int = 0) -> list[float]:
    """Train with pipelined calls, as clients do, and return the losses."""
    calls = []
    for step in range(steps):
        calls.append(asyncio.ensure_future(model.forward_backward(make_tree_samples(seed + step), LOSS)))
        calls.append(asyncio.ensure_future(model.optim_step(ADAM)))
    results = await asyncio.gather(*calls)
    return [result.loss for result in results[::2]]  # pyright: ignore[reportAttributeAccessIssue]


async def compute_logprobs(model: TrainingModel, tokens: list[int]) -> Floats:
    (logprobs,) = await model.forward([make_sample("tokens", tokens, 1)])
    return logprobs


def get_adapter_folder(info: CheckpointInfo, tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / info.path.removeprefix("tinker://") / "adapter"


# --- training ---


@pytest.mark.parametrize("rank", [4, 8])
async def test_service_trains_bit_identically_alongside_other_models(
    service: TrainingService, model: ModelConfig, tmp_path: Path, rank: int
) -> None:
    config = LocalBackendConfig(lora=LoraConfig(rank=rank, alpha=32), threads=1)
    local = LocalBackend(model, config, seed=5)
    expected_losses = await train(local)
    await local.publish(tmp_path / "local")
    await local.close()

    # Create and train all models concurrently, while the service samples.
    model_under_test, *others = await asyncio.gather(
        create_model(service, rank=rank, seed=5), *(create_model(service, seed=seed) for seed in (6, 7))
    )
    losses, *_ = await asyncio.gather(
        train(model_under_test),
        *(train(other, seed=other.adapter.seed or 0) for other in others),
        service.sample(None, "me", PROMPT, SamplingParams(max_tokens=30), 4),
    )

    assert losses == expected_losses
    info = await model_under_test.export("trained")
    assert hash_adapter(get_adapter_folder(info, tmp_path)) == hash_adapter(tmp_path / "local")


async def test_models_share_the_base_weights(model: ModelConfig) -> None:
    base_model = load_base(model)
    first, _ = create_backend(base_model, model, AdapterSpec(rank=4), threads=1)
    second, _ = create_backend(base_model, model, AdapterSpec(rank=8, train_unembed=True), threads=1)
    base = {parameter.data_ptr() for parameter in base_model.parameters()}
    for backend in (first, second):
        frozen = [p for p in backend._model.model.parameters() if not p.requires_grad]
        assert {p.data_ptr() for p in frozen} == base
        await backend.close()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"train_unembed": True}, {"attn", "mlp", "head"}),
        ({"train_mlp": False}, {"attn"}),
        ({"train_attn": False}, {"mlp"}),
        ({"train_attn": False, "train_mlp": False, "train_unembed": True}, {"head"}),
    ],
)
async def test_requested_layers_are_trained_and_sampled(
    service: TrainingService, tmp_path: Path, flags: dict[str, bool], expected: set[str]
) -> None:
    trained = await create_model(service, **flags)
    before = await compute_logprobs(trained, PROMPT)
    await train(trained)
    info = await trained.export("sampler")
    assert info.extra == {"train_attn": True, "train_mlp": True, "train_unembed": False} | flags

    layer_types = {"self_attn": "attn", "mlp": "mlp", "lm_head": "head"}
    names = load_file(get_adapter_folder(info, tmp_path) / "adapter_model.safetensors").keys()
    adapted = {layer_types[part] for name in names for part in name.split(".") if part in layer_types}
    assert adapted == expected

    (reply,) = await service.sample(info.path, "me", PROMPT, SamplingParams(max_tokens=8, seed=1), 1)
    after = await compute_logprobs(trained, PROMPT + reply.token_ids)
    assert np.abs(after[1 : len(PROMPT)] - before[1:]).max() > 1e-2
    np.testing.assert_allclose(reply.logprobs, after[len(PROMPT) :], atol=1e-5)
    reported = await service.compute_logprobs(info.path, "me", PROMPT + reply.token_ids)
    np.testing.assert_allclose(reported, after, atol=1e-5)
    # The base model and its tied output layer are unchanged.
    np.testing.assert_allclose(await service.compute_logprobs(None, "me", PROMPT), before, atol=1e-5)


async def test_step_without_gradient_equals_step_with_zero_gradient(
    service: TrainingService,
) -> None:
    """In both cases, the optimizer's moments decay and still change the weights."""
    models = [await create_model(service) for _ in range(2)]
    zeros = [make_sample("zero", PROMPT, 1, advantages=np.zeros(len(PROMPT), np.float32))]
    untrained = [make_sample("none", PROMPT, len(PROMPT))]
    for model, batch in zip(models, (zeros, untrained), strict=True):
        assert (await model.optim_step(ADAM)).grad_norm == 0
        await train(model, steps=2)
        assert (await model.forward_backward(batch, LOSS)).loss == 0
        before = await compute_logprobs(model, PROMPT)
        assert (await model.optim_step(ADAM)).grad_norm == 0
        assert np.abs(await compute_logprobs(model, PROMPT) - before)[1:].max() > 1e-4
    np.testing.assert_array_equal(*[await compute_logprobs(model, PROMPT) for model in models])


async def test_backend_rejections_are_user_errors(service: TrainingService) -> None:
    model = await create_model(service)
    for sample, text in [
        (make_sample("a", [5, 9999], 1), "outside the vocabulary"),
        (make_sample("b", [5] * 257, 1), "b has 257 tokens"),
        (make_sample("c", [5, 6], 1, logprobs=np.full(2, np.nan, np.float32)), "the trained token"),
    ]:
        with pytest.raises(ProtocolError, match=text) as error:
            await model.forward_backward([sample], LOSS)
        assert (error.value.status, error.value.category) == (400, "user")
    assert np.isfinite(await train(model, steps=1)).all()


# --- checkpoints ---


async def test_loaded_state_continues_identically_after_restart(open_service: OpenService) -> None:
    async with open_service() as service:
        model = await create_model(service)
        await train(model, steps=2)
        saved = await model.save("two", optimizer=True)
        next_losses = await train(model, steps=2, seed=10)
        final_logprobs = await compute_logprobs(model, PROMPT)
    async with open_service() as service:
        assert service.checkpoints.find(saved.path, "me") == saved
        resumed = await create_model(service, seed=99)
        await resumed.load(saved.path, optimizer=True)
        assert await train(resumed, steps=2, seed=10) == next_losses
        np.testing.assert_array_equal(await compute_logprobs(resumed, PROMPT), final_logprobs)

        fresh = await create_model(service, seed=99)
        await fresh.load(saved.path, optimizer=False)
        losses = await train(fresh, steps=2, seed=10)
        assert losses[0] == next_losses[0]
        assert losses[1] != next_losses[1]


async def test_mismatched_states_are_rejected(service: TrainingService, tmp_path: Path) -> None:
    model = await create_model(service)
    await train(model, steps=1)
    weights = await model.save("weights", optimizer=False)
    full = await model.save("full", optimizer=True)
    sampler = await model.export("sampler")
    assert weights.size_bytes < full.size_bytes
    await model.load(weights.path, optimizer=False)
    with pytest.raises(ProtocolError, match="has no optimizer state"):
        await model.load(weights.path, optimizer=True)
    with pytest.raises(ProtocolError, match="saved for sampling only"):
        await model.load(sampler.path, optimizer=False)
    other = await create_model(service, rank=4)
    with pytest.raises(ProtocolError, match="a different model or adapter") as error:
        await other.load(full.path, optimizer=True)
    assert full.path in str(error.value)
    assert str(tmp_path) not in str(error.value)
    other_owners_model = await create_model(service, owner="you")
    with pytest.raises(ProtocolError, match="was not found or has expired"):
        await other_owners_model.load(full.path, optimizer=True)


# --- sampling ---


async def test_seeded_replies_differ_and_are_reproducible(service: TrainingService) -> None:
    params = SamplingParams(max_tokens=12, seed=4)
    replies = await service.sample(None, "me", PROMPT, params, 3)
    assert len({tuple(reply.token_ids) for reply in replies}) == 3
    repeated = await service.sample(None, "me", PROMPT, params, 3)
    assert [reply.token_ids for reply in repeated] == [reply.token_ids for reply in replies]
    (single,) = await service.sample(None, "me", PROMPT, params, 1)
    assert single.token_ids == replies[0].token_ids
    for reply in replies:
        assert len(reply.token_ids) == len(reply.logprobs) <= 12
        assert (reply.stop_reason == "length") == (len(reply.token_ids) == 12)
        assert reply.text


async def test_logprobs_use_the_full_softmax_for_any_sampling_params(
    service: TrainingService,
) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.3, top_k=5, seed=1)
    (reply,) = await service.sample(None, "me", PROMPT, params, 1)
    reported = await service.compute_logprobs(None, "me", PROMPT + reply.token_ids)
    np.testing.assert_allclose(reply.logprobs, reported[len(PROMPT) :], atol=1e-5)


async def test_more_policies_than_max_samplers_share_engines(open_service: OpenService) -> None:
    async with open_service(max_samplers=2) as service:
        model = await create_model(service)
        expected: dict[str | None, Floats] = {None: await compute_logprobs(model, PROMPT)}
        for step in range(3):
            await train(model, steps=1, seed=step)
            # The first policy is a saved state, which can also be sampled.
            info = await (model.export(f"v{step}") if step else model.save("v0", optimizer=True))
            expected[info.path] = await compute_logprobs(model, PROMPT)
        paths = [*expected, *reversed(expected)] * 2
        reported = await asyncio.gather(*(service.compute_logprobs(path, "me", PROMPT) for path in paths))
        for path, logprobs in zip(paths, reported, strict=True):
            np.testing.assert_allclose(logprobs, expected[path], atol=1e-5)


async def test_policy_in_use_keeps_its_engine(open_service: OpenService) -> None:
    async with open_service(max_samplers=2) as service:
        model = await create_model(service)
        paths: list[str] = []
        for step in range(3):
            await train(model, steps=1, seed=step)
            paths.append((await model.export(f"v{step}")).path)
        sample_task = asyncio.create_task(
            service.sample(paths[0], "me", PROMPT, SamplingParams(max_tokens=100, seed=2), 1)
        )
        await asyncio.sleep(0)
        while not sample_task.done():
            for path in paths[1:]:
                await service.compute_logprobs(path, "me", PROMPT)
        (sampled,) = await sample_task
        reported = await service.compute_logprobs(paths[0], "me", PROMPT + sampled.token_ids)
        np.testing.assert_allclose(sampled.logprobs, reported[len(PROMPT) :], atol=1e-5)


async def test_busy_engines_share_the_kv_memory_and_idle_ones_release_it(
    service: TrainingService,
) -> None:
    model = await create_model(service)
    path = (await model.export("v")).path
    params = SamplingParams(max_tokens=150, seed=1)
    await service.sample(None, "me", PROMPT, params, 8)
    base_scheduler = service._sampler_pool._engines[""].engine._scheduler
    all_kv_tokens = base_scheduler._kv_tokens
    assert base_scheduler._rows.capacity_tokens > 0
    await service.sample(path, "me", PROMPT, params, 8)
    await wait_until(lambda: base_scheduler._rows.capacity_tokens == 0)
    (policy_scheduler,) = [
        pooled.engine._scheduler for key, pooled in service._sampler_pool._engines.items() if key
    ]
    assert policy_scheduler._kv_tokens == all_kv_tokens
    tasks = [asyncio.create_task(service.sample(policy, "me", PROMPT, params, 8)) for policy in (None, path)]
    await wait_until(lambda: base_scheduler._kv_tokens == policy_scheduler._kv_tokens == all_kv_tokens // 2)
    await asyncio.gather(*tasks)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.001)


async def test_replaced_sampler_serves_the_new_weights(service: TrainingService) -> None:
    model = await create_model(service)
    info = await model.export("latest")
    before = await service.compute_logprobs(info.path, "me", PROMPT)
    await train(model)
    await model.export("latest")
    after = await service.compute_logprobs(info.path, "me", PROMPT)
    assert np.abs(after - before)[1:].max() > 1e-2
    service.checkpoints.delete(info.path, "me")
    with pytest.raises(ProtocolError, match="was not found or has expired"):
        await service.compute_logprobs(info.path, "me", PROMPT)


async def test_invalid_sampling_requests_are_rejected(
    service: TrainingService,
) -> None:
    for prompt, params, count, text in [
        ([], SamplingParams(), 1, "empty"),
        ([5, 99999], SamplingParams(), 1, "must be between 0 and"),
        ([5] * 256, SamplingParams(), 1, "must have fewer than 256"),
        (PROMPT, SamplingParams(temperature=-1), 1, "temperature"),
        (PROMPT, SamplingParams(), 0, "num_samples must be between 1 and .* got 0"),
    ]:
        with pytest.raises(ProtocolError, match=text) as error:
            await service.sample(None, "me", prompt, params, count)
        assert (error.value.status, error.value.category) == (400, "user")
    assert await service.sample(None, "me", PROMPT, SamplingParams(max_tokens=1), 1)


# --- sessions and limits ---


async def test_sessions_and_models_of_another_owner_are_not_found(service: TrainingService) -> None:
    model = await create_model(service)
    lookups: list[Callable[[], object]] = [
        lambda: service.heartbeat(model.session_id, "you"),
        lambda: service.find_model(model.model_id, "you"),
        lambda: service.find_model("model-unknown", "me"),
    ]
    for look_up in lookups:
        with pytest.raises(ProtocolError) as error:
            look_up()
        assert error.value.status == 404
    with pytest.raises(ProtocolError):
        await service.end_session(model.session_id, "you")
    assert service.find_model(model.model_id, "me") is model


async def test_session_without_heartbeats_ends_with_its_models(open_service: OpenService) -> None:
    # The lifetime is long enough to create two models on a loaded machine. A lookup renews the session, so
    # the test waits for twice the lifetime before the first lookup.
    async with open_service(session_ttl=4.0) as service:
        idle, active = await create_model(service), await create_model(service)
        sampler = await idle.export("kept")
        deadline = time.monotonic() + 8.0
        while time.monotonic() < deadline:
            service.heartbeat(active.session_id, "me")
            await asyncio.sleep(0.1)
        with pytest.raises(ProtocolError, match="has ended"):
            service.heartbeat(idle.session_id, "me")
        with pytest.raises(ProtocolError, match="was closed"):
            service.find_model(idle.model_id, "me")
        with pytest.raises(ProtocolError, match="was closed") as error:
            await idle.optim_step(ADAM)
        assert error.value.status == 404
        assert service.find_model(active.model_id, "me") is active
        assert await service.sample(sampler.path, "me", PROMPT, SamplingParams(max_tokens=1), 1)


async def test_expired_checkpoints_are_removed_from_disk(open_service: OpenService, tmp_path: Path) -> None:
    async with open_service(session_ttl=4.0) as service, asyncio.timeout(60):
        info = await (await create_model(service)).export("short", ttl=0.01)
        folder = get_adapter_folder(info, tmp_path).parent
        while folder.exists():  # noqa: ASYNC110 - removed by a background task
            await asyncio.sleep(0.05)


async def test_closed_model_frees_its_slot(open_service: OpenService) -> None:
    async with open_service(max_models=2) as service:
        first, second = await create_model(service), await create_model(service)
        with pytest.raises(ProtocolError, match=r"too many models .*limit: 2") as error:
            await create_model(service)
        assert error.value.status == 429
        await service.close_model(first.model_id, "me")
        third = await create_model(service)
        await service.end_session(second.session_id, "me")
        assert await create_model(service)
        assert np.isfinite(await train(third, steps=1)).all()


async def test_concurrent_models_over_the_limit_are_rejected(open_service: OpenService) -> None:
    async with open_service(max_models=2) as service:
        results = await asyncio.gather(*(create_model(service) for _ in range(5)), return_exceptions=True)
        assert sum(isinstance(model, TrainingModel) for model in results) == 2


async def test_invalid_model_requests_are_rejected(open_service: OpenService) -> None:
    async with open_service(max_rank=16) as service:
        session = await service.create_session("me")
        for base, adapter, text in [
            (
                "another-model",
                AdapterSpec(rank=1),
                "unknown base_model 'another-model'; this server serves 'tiny'",
            ),
            ("tiny", AdapterSpec(rank=17), "must be between 1 and 16, got 17"),
            ("tiny", AdapterSpec(rank=0), "must be between 1 and 16, got 0"),
            ("tiny", AdapterSpec(rank=1, seed=2**80), "64-bit integer"),
            ("tiny", AdapterSpec(rank=1, train_attn=False, train_mlp=False), "select no layers"),
        ]:
            with pytest.raises(ProtocolError, match=text) as error:
                await service.create_model(session, "me", base, adapter)
            assert error.value.status == 400
        unseeded = await service.create_model(session, "me", "tiny", AdapterSpec(rank=1))
        assert unseeded.adapter.seed is not None
