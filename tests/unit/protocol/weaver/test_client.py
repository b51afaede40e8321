"""Tests for the methods of the SDK's blocking client."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weaver import ServiceClient, WeaverAPIError
from weaver.operations import OperationHandle, WeaverOperationError
from weaver.training_client import TrainingClient
from weaver.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams

from instar.backends.local.backend import LocalBackend
from instar.config import AdamConfig, LocalBackendConfig, LossConfig, LossName, ModelConfig
from instar.config import LoraConfig as InstarLoraConfig
from instar.conformance.batches import make_tree_samples
from instar.protocol.base import ServiceLimits
from instar.types import Sample
from tests.unit.protocol.weaver.conftest import BASE_MODEL, KEY, OTHER_KEY, Connect, run_server

IDS = list(range(20, 40))
LORA = LoraConfig(rank=8, seed=5, train_unembed=False)
ADAM = AdamParams(learning_rate=0.01, eps=1e-8, weight_decay=0.0)


def make_datum(ids: list[int] = IDS) -> Datum:
    return Datum(
        ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    )


def make_ratio_datum(sample: Sample) -> Datum:
    is_trained = sample.mask > 0
    inputs = {
        "target_tokens": sample.token_ids[1:].tolist(),
        "logprobs": np.where(is_trained, sample.logprobs, 0)[1:].tolist(),
        "advantages": sample.advantages[1:].tolist(),
        "loss_mask": sample.mask[1:].tolist(),
    }
    return Datum(ModelInput.from_ints(sample.token_ids[:-1].tolist()), inputs)


def get_logprobs(result: Any) -> list[list[float]]:
    return [output["logprobs"]["data"] for output in result["result"]["loss_fn_outputs"]]


def create_model(client: ServiceClient) -> TrainingClient:
    return client.create_model(base_model=BASE_MODEL, lora_config=LORA)


@pytest.fixture
def trainer(connect: Connect) -> TrainingClient:
    return create_model(connect())


def test_supported_models_are_listed(connect: Connect, model_folder: Path) -> None:
    client = connect()
    assert client.list_supported_models() == [BASE_MODEL]
    (model,) = client.list_supported_models(detailed=True)
    assert [mode.mode for mode in model.training_modes] == ["lora"]
    trainer = client.create_training_client(base_model=BASE_MODEL)
    assert trainer.get_tokenizer().encode("hello")
    assert client.get_model(trainer.model_id)["training_mode"] == "lora"
    trainer.log_metrics({"reward": 0.5}, step=1)


def test_model_trains_and_is_sampled(trainer: TrainingClient) -> None:
    before = trainer.forward([make_datum()], "forward_logprob")
    start = time.monotonic()
    for _ in range(15):
        result = trainer.forward_backward([make_datum()], "cross_entropy")
        step = trainer.optim_step(ADAM)
    assert time.monotonic() - start < 10, "the SDK waited too long between polls"
    assert step["metrics"]["grad_norm"] > 0
    assert result["result"]["metrics"]["loss"] == pytest.approx(-sum(get_logprobs(result)[0]), rel=1e-5)
    after = trainer.forward([make_datum()], "forward_logprob")
    assert sum(get_logprobs(after)[0]) > sum(get_logprobs(before)[0]) + 20

    sampler = trainer.save_weights_and_get_sampling_client(name="learned")
    prompt = ModelInput.from_ints(IDS)
    logprobs = sampler.compute_logprobs(prompt=prompt)
    assert isinstance(logprobs, list)
    assert logprobs[0] is None
    np.testing.assert_allclose(logprobs[1:], get_logprobs(after)[0], atol=1e-4)
    greedy = SamplingParams(max_tokens=6, temperature=0.0)
    response = sampler.sample(prompt=ModelInput.from_ints(IDS[:4]), sampling_params=greedy, num_samples=2)
    first, second = response["sequences"]
    assert first["tokens"] == second["tokens"] == IDS[4:10]
    assert first["stop_reason"] == "length"
    assert first["text"] == trainer.get_tokenizer().decode(first["tokens"])
    np.testing.assert_allclose(first["logprobs"], get_logprobs(after)[0][3:9], atol=1e-4)


def test_zero_weight_targets_have_logprobs(trainer: TrainingClient) -> None:
    """Clients compute the loss as the dot product of logprobs and weights over all targets."""
    weights = [0.0] * 9 + [1.0] * 10
    datum = make_datum().with_loss_fn_inputs(weights=weights)
    result = trainer.forward_backward([datum], "cross_entropy")
    assert result["result"]["metrics"]["loss"] == pytest.approx(
        -np.dot(get_logprobs(result)[0], weights), rel=1e-5
    )


def test_sampling_stops_and_returns_prompt_logprobs(connect: Connect) -> None:
    sampler = connect().create_sampling_client(base_model=BASE_MODEL)
    prompt = ModelInput.from_ints(IDS)
    greedy = SamplingParams(max_tokens=3, temperature=0.0)
    (reply,) = sampler.sample(prompt=prompt, sampling_params=greedy)["sequences"]
    params = SamplingParams(max_tokens=3, temperature=0.0, stop=[reply["tokens"][1]])
    response = sampler.sample(prompt=prompt, sampling_params=params, include_prompt_logprobs=True)
    assert response["sequences"][0]["tokens"] == reply["tokens"][:2]
    assert response["sequences"][0]["stop_reason"] == "stop"
    assert response["raw_result"]["prompt_logprobs"] == sampler.compute_logprobs(prompt=prompt)
    seeded = SamplingParams(max_tokens=8, seed=3)
    samples = [
        sampler.sample(prompt=prompt, sampling_params=seeded)["sequences"][0]["tokens"] for _ in range(2)
    ]
    assert samples[0] == samples[1]
    # Without max_tokens, sampling continues to the end of the context, which has 1024 tokens.
    (reply_to_long_prompt,) = sampler.sample(prompt=ModelInput.from_ints(IDS * 51))["sequences"]
    assert len(reply_to_long_prompt["tokens"]) <= 4


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
async def test_service_matches_the_local_backend(
    trainer: TrainingClient, model_folder: Path, name: LossName
) -> None:
    samples, loss = make_tree_samples(), LossConfig(name=name)
    local = LocalBackend(
        ModelConfig(name=str(model_folder), dtype="fp32"),
        LocalBackendConfig(lora=InstarLoraConfig(rank=8, alpha=32.0), threads=1),
        seed=5,
    )
    for _ in range(2):
        data = [make_ratio_datum(sample) for sample in samples]
        if name == "cross_entropy":
            for datum in data:
                datum.loss_fn_inputs["weights"] = datum.loss_fn_inputs.pop("advantages")
                del datum.loss_fn_inputs["logprobs"]
        result, expected_result = (
            trainer.forward_backward(data, name),
            await local.forward_backward(samples, loss),
        )
        assert result["result"]["metrics"]["loss"] == pytest.approx(expected_result.loss, rel=1e-6)
        for actual, expected in zip(get_logprobs(result), expected_result.logprobs, strict=True):
            np.testing.assert_allclose(np.array(actual, np.float32), expected[1:], rtol=1e-6)
        adam_params = AdamParams(learning_rate=0.01, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5)
        adam_config = AdamConfig(lr=0.01, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5)
        assert trainer.optim_step(adam_params)["metrics"]["grad_norm"] == pytest.approx(
            (await local.optim_step(adam_config)).grad_norm, rel=1e-5
        )
    forward_loss = trainer.forward(data, name)["result"]["metrics"]["loss"]
    backward_loss = trainer.forward_backward(data, name)["result"]["metrics"]["loss"]
    assert forward_loss == pytest.approx(backward_loss, rel=1e-5)
    await local.close()


def test_state_is_saved_loaded_and_listed(trainer: TrainingClient, connect: Connect) -> None:
    def step(client: TrainingClient) -> float:
        loss = client.forward_backward([make_datum()], "cross_entropy")["result"]["metrics"]["loss"]
        client.optim_step(ADAM)
        return loss

    step(trainer)
    full = trainer.save_state(name="full", checkpoint_type="weight_and_optimizer")
    weights_only = trainer.save_state(ttl_seconds=60)
    assert full.path == f"weaver://{trainer.model_id}/checkpoints/full"
    assert (full.checkpoint_type, weights_only.checkpoint_type) == ("weight_and_optimizer", "weight")
    assert weights_only.expires_at is not None
    sampling_only = trainer.save_state(name="full", checkpoint_type="sampling")
    assert trainer.list_checkpoints() == [full, weights_only, sampling_only]
    expected = [step(trainer) for _ in range(3)]

    other = create_model(connect())
    other.load_state_with_optimizer(full)
    assert [step(other) for _ in range(3)] == expected
    other.load_state(weights_only.path)
    losses = [step(other) for _ in range(3)]
    assert losses[0] == expected[0]
    assert losses[2] != expected[2]
    with pytest.raises(WeaverOperationError, match="has no optimizer state"):
        other.load_state_with_optimizer(weights_only)
    with pytest.raises(WeaverOperationError, match="was not found or has expired"):
        other.load_state(f"weaver://{trainer.model_id}/checkpoints/missing")
    with pytest.raises(WeaverOperationError, match="invalid checkpoint path '/etc/passwd'"):
        other.load_state("/etc/passwd")
    assert step(other) > 0


def test_failed_call_does_not_block_later_calls(trainer: TrainingClient) -> None:
    with pytest.raises(WeaverOperationError, match="unknown loss_fn 'unknown_loss'") as caught:
        trainer.forward_backward([make_datum()], "unknown_loss")
    assert caught.value.code == "invalid_request"
    unmasked = Datum(
        ModelInput.from_ints([1]), {"target_tokens": [2], "logprobs": [-1.0], "advantages": [1.0]}
    )
    with pytest.raises(WeaverOperationError, match="loss_mask is missing"):
        trainer.forward_backward([unmasked], "importance_sampling")
    with pytest.raises(WeaverOperationError, match="at most 1024"):
        trainer.forward_backward([make_datum([1] * 1100)], "cross_entropy")
    with pytest.raises(WeaverOperationError, match="beta1"):
        trainer.optim_step(AdamParams(beta1=2.0))
    trainer.forward_backward([make_datum()], "cross_entropy")
    assert trainer.optim_step(AdamParams(learning_rate=0.0))["metrics"]["lr"] == 0


def test_rejected_request_does_not_block_later_calls(trainer: TrainingClient) -> None:
    http, headers = trainer._service.http, {"content-type": "application/json", "X-WEAVER-API-KEY": KEY}

    def send(path: str, body: str) -> dict[str, Any]:
        path = f"/api/v1/models/{trainer.model_id}/{path}"
        return http._client.post(path, content=body, headers=headers).json()

    trainer.save_state(name="first")
    bodies = {
        "optimizer-steps": '{"payload": {"seq_id": 1, "adam_params": {"learning_rate": NaN}}}',
        "forward-passes": '{"payload": {"seq_id": 2, "tensor_transport": "unknown"}}',
        "export-sampler": '{"seq_id": 3, "ttl_seconds": "long"}',
    }
    for path, body in bodies.items():
        assert send(path, body)["error"] == "invalid_request"
    exported = send("export-sampler", '{"seq_id": 4}')
    assert exported["status"] == "done", exported
    reused = send("export-sampler", '{"seq_id": 2}')
    assert reused["error"] == "conflict"
    assert "sequence id 2" in reused["message"]
    assert "rejected request" in reused["message"]


def test_unsupported_options_and_unknown_models_are_rejected(connect: Connect) -> None:
    client = connect()
    with pytest.raises(WeaverAPIError, match="unsupported training_mode 'full_ft'"):
        client.create_model(base_model=BASE_MODEL, training_mode="full_ft")
    with pytest.raises(WeaverAPIError, match="unknown base_model 'other'"):
        client.create_model(base_model="other")
    with pytest.raises(WeaverAPIError, match="unknown base_model 'other'"):
        client.create_sampling_client(base_model="other")
    with pytest.raises(WeaverAPIError, match="does not support GET /api/v1/organizations"):
        client.list_organizations()
    sampler = client.create_sampling_client(base_model=BASE_MODEL)
    with pytest.raises(WeaverAPIError, match="does not support topk_prompt_logprobs"):
        sampler.sample(prompt=ModelInput.from_ints([1]), topk_prompt_logprobs=3)


def test_invalid_keys_are_rejected_and_objects_belong_to_their_key(
    connect: Connect, trainer: TrainingClient
) -> None:
    with pytest.raises(WeaverAPIError, match="is not valid for this server") as caught:
        connect(api_key="sk-wrong")
    assert (caught.value.status_code, caught.value.code) == (401, "unauthorized")
    saved = trainer.save_state(name="mine")
    other_client = connect(api_key=OTHER_KEY)
    for send in (
        lambda: other_client.get_model(trainer.model_id),
        lambda: other_client.terminate_model(trainer.model_id),
        lambda: other_client.get_sampling_client(saved.path),
        lambda: connect(api_key=OTHER_KEY, session_id=trainer.session_id),
    ):
        with pytest.raises(WeaverAPIError) as caught:
            send()
        assert (caught.value.status_code, caught.value.retryable) == (404, False)
    other_trainer = create_model(other_client)
    with pytest.raises(WeaverOperationError, match="was not found or has expired"):
        other_trainer.load_state(saved.path)


def test_closed_model_is_not_found(connect: Connect) -> None:
    client = connect()
    trainer = create_model(client)
    saved = trainer.save_state()
    trainer.terminate(["inference"])
    trainer.forward([make_datum()], "forward_logprob")
    trainer.terminate()
    with pytest.raises(WeaverAPIError, match=r"model .* does not exist or was closed") as caught:
        trainer.forward([make_datum()], "forward_logprob")
    assert caught.value.status_code == 404
    assert trainer.list_checkpoints() == [saved]
    assert client.get_sampling_client(saved.path).compute_logprobs(prompt=ModelInput.from_ints(IDS))


def test_second_client_cannot_train_the_same_model(connect: Connect, trainer: TrainingClient) -> None:
    trainer.forward_backward([make_datum()], "cross_entropy")
    second = TrainingClient(
        service=connect(), model_id=trainer.model_id, base_model=BASE_MODEL, session_id=trainer.session_id
    )
    with pytest.raises(WeaverAPIError, match="only one client can train a model") as caught:
        second.forward_backward([make_datum()], "cross_entropy")
    assert caught.value.status_code == 409


def test_repeated_request_returns_the_same_operation(trainer: TrainingClient) -> None:
    http = trainer._service.http
    headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "X-WEAVER-API-KEY": KEY}

    def post_twice(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        return [http._client.post(f"/api/v1/{path}", json=body, headers=headers).json() for _ in range(2)]

    models_path = f"sessions/{trainer.session_id}/models"
    first, second = post_twice(models_path, {"base_model": BASE_MODEL, "model_seq_id": 2})
    assert first == second
    assert post_twice(models_path, {"base_model": BASE_MODEL, "model_seq_id": 3})[0] != first
    path = f"models/{first['id']}"
    data = [make_datum().to_payload()]
    pass_payload = {"seq_id": 1, "forward_backward_input": {"loss_fn": "cross_entropy", "data": data}}
    first, second = post_twice(f"{path}/forward-backward-passes", {"payload": pass_payload})
    assert first == second
    step_payload = {"seq_id": 2, "adam_params": ADAM.to_payload()}
    first, second = post_twice(f"{path}/optimizer-steps", {"payload": step_payload})
    assert first == second
    assert first["response"]["metrics"]["grad_norm"] > 0


def test_restarted_server_keeps_checkpoints_but_not_models(model_folder: Path, tmp_path: Path) -> None:
    with run_server(model_folder, tmp_path) as address:
        client = ServiceClient(base_url=address, api_key=KEY, heartbeat_interval=0.05)
        client.connect()
        trainer = create_model(client)
        handle = trainer.forward_backward([make_datum()], "cross_entropy", wait=False)
        trainer.optim_step(ADAM)
        saved = trainer.save_state(checkpoint_type="weight_and_optimizer")
        sampler = trainer.save_weights_and_get_sampling_client()
        logprobs = sampler.compute_logprobs(prompt=ModelInput.from_ints(IDS))
    with run_server(model_folder, tmp_path, port=int(address.rpartition(":")[2])):
        start = time.monotonic()
        for send in (
            lambda: trainer.forward_backward([make_datum()], "cross_entropy"),
            lambda: OperationHandle(client.http, handle.operation_id, {}).wait(),
            lambda: create_model(client),
        ):
            with pytest.raises(WeaverAPIError, match="does not exist") as caught:
                send()
            assert (caught.value.status_code, caught.value.retryable) == (404, False)
        assert time.monotonic() - start < 5
        assert sampler.compute_logprobs(prompt=ModelInput.from_ints(IDS)) == logprobs
        new_client = ServiceClient(base_url=address, api_key=KEY, heartbeat_interval=0.05)
        new_client.connect()
        resumed = create_model(new_client)
        resumed.load_state_with_optimizer(saved)
        np.testing.assert_allclose(
            get_logprobs(resumed.forward([make_datum()], "forward_logprob"))[0],
            logprobs[1:],
            atol=1e-4,
        )
        new_client.close()
        client.close()


def test_service_limits_are_enforced(model_folder: Path, tmp_path: Path) -> None:
    limits = ServiceLimits(max_body=20_000, max_models=1, max_rank=8, session_ttl=1.0)
    with run_server(model_folder, tmp_path, limits=limits) as address:
        client = ServiceClient(base_url=address, api_key=KEY, heartbeat_interval=0.1)
        client.connect()
        with pytest.raises(WeaverAPIError, match="must be between 1 and 8"):
            client.create_model(base_model=BASE_MODEL, lora_config=LoraConfig(rank=9))
        trainer = create_model(client)
        with pytest.raises(WeaverAPIError, match="too many models") as caught:
            create_model(client)
        assert (caught.value.status_code, caught.value.retryable) == (429, True)
        with pytest.raises(WeaverAPIError, match="exceeds the limit of 20000 bytes") as caught:
            trainer.forward([make_datum()] * 500, "forward_logprob")
        assert caught.value.status_code == 413
        time.sleep(1.5)
        client.get_model(trainer.model_id)  # heartbeats have kept the session alive
        client._heartbeat_stop_event.set()
        time.sleep(1.7)
        with pytest.raises(WeaverAPIError, match=r"model .* does not exist or was closed"):
            client.get_model(trainer.model_id)
        client.close()
