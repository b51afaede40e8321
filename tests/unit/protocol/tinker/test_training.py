"""Tests for training through the real SDK, over a socket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.sdk_leaks import IGNORE_SDK_LEAKS
from tests.unit.protocol.tinker.conftest import BASE_MODEL, KEY
from tests.unit.protocol.tinker.raw import RawTinkerClient
from tests.unit.protocol.tinker.test_passes import make_datum

ADAM = types.AdamParams(learning_rate=1e-2)
ZERO_LR = types.AdamParams(learning_rate=0.0)
TOKENS = [5, 9, 20, 33, 47, 61]
RATIO_LOSSES: list[Any] = ["importance_sampling", "ppo", "cispo", "dro"]

pytestmark = IGNORE_SDK_LEAKS


def make_next_token_datum(tokens: list[int] = TOKENS, **tensors: list[float]) -> types.Datum:
    return make_datum(tokens[:-1], target_tokens=tokens[1:], **tensors)


def get_logprobs(output: types.ForwardBackwardOutput, index: int = 0) -> np.ndarray[Any, Any]:
    return np.asarray(output.loss_fn_outputs[index]["logprobs"].data)


def run_step(training_client: tinker.TrainingClient) -> float:
    """Send a pass and a step without waiting in between, and return the loss before the step."""
    pass_future = training_client.forward_backward([make_next_token_datum()], "cross_entropy")
    step_future = training_client.optim_step(ADAM)
    assert step_future.result().metrics["grad_norm"] > 0
    return pass_future.result().metrics["loss:sum"]


def test_server_reports_its_base_model_and_the_created_model(
    url: str, training_client: tinker.TrainingClient
) -> None:
    rest = tinker.RestClient(base_url=url, api_key=KEY)
    [model] = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length, model.trainable) == (BASE_MODEL, 256, True)
    info = training_client.get_info()
    assert (info.model_id, info.lora_rank, info.is_lora) == (training_client.model_id, 4, True)
    tokenizer = training_client.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_training_reduces_the_loss(training_client: tinker.TrainingClient) -> None:
    losses = [run_step(training_client) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]


def test_loss_matches_the_logprobs(training_client: tinker.TrainingClient) -> None:
    weights = [0.0, 1.0, 0.5, 0.0, 2.0]
    data = [make_next_token_datum(weights=weights), make_next_token_datum([7, 8, 9])]
    forward = training_client.forward(data, "cross_entropy").result()
    backward = training_client.forward_backward(data, "cross_entropy").result()
    np.testing.assert_allclose(get_logprobs(forward), get_logprobs(backward), rtol=1e-5)
    expected = -(get_logprobs(backward) @ weights) - get_logprobs(backward, 1).sum()
    assert backward.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert forward.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", RATIO_LOSSES)
def test_ratio_losses_use_old_logprobs(training_client: tinker.TrainingClient, loss: Any) -> None:
    old = get_logprobs(training_client.forward([make_next_token_datum()], "cross_entropy").result())
    data = [make_next_token_datum(logprobs=(old - 0.1).tolist(), advantages=[0.0, 1.0, -1.0, 2.0, 0.5])]
    output = training_client.forward_backward(data, loss).result()
    np.testing.assert_allclose(get_logprobs(output), old, rtol=1e-5)
    ratio, advantages = np.exp(0.1), np.array([0.0, 1.0, -1.0, 2.0, 0.5])
    expected = {
        "importance_sampling": -ratio * advantages.sum(),
        "ppo": -ratio * advantages.sum(),
        "cispo": -ratio * (advantages * old).sum(),
        "dro": -(advantages * old - 0.025 * 0.1**2).sum(),
    }
    assert output.metrics["loss:sum"] == pytest.approx(expected[loss], rel=1e-4)
    clip_options = (
        {"clip_low_threshold": 0.5, "clip_high_threshold": 1.0} if loss in ("ppo", "cispo") else None
    )
    assert (
        training_client.forward_backward(data, loss, clip_options).result().metrics.keys()
        == output.metrics.keys()
    )


def test_many_pass_chunks_out_of_order_are_combined(training_client: tinker.TrainingClient) -> None:
    """The SDK sends the first of several chunks last."""
    count = 2100
    single_loss = (
        training_client.forward([make_next_token_datum([7, 8])], "cross_entropy").result().metrics["loss:sum"]
    )
    output = training_client.forward_backward(
        [make_next_token_datum([7, 8])] * count, "cross_entropy"
    ).result()
    training_client.optim_step(ADAM).result()
    assert len(output.loss_fn_outputs) == count
    assert output.metrics["loss:sum"] == pytest.approx(count * single_loss, rel=1e-4)


def test_custom_loss_is_computed_by_the_client(training_client: tinker.TrainingClient) -> None:
    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -sum(row.sum() for row in logprobs), {"custom": 1.0}  # pyright: ignore

    output = training_client.forward_backward_custom([make_next_token_datum()], loss).result()
    assert output.metrics["custom"] == 1.0
    expected = training_client.optim_step(ZERO_LR).result().metrics["grad_norm"]
    training_client.forward_backward([make_next_token_datum()], "cross_entropy")
    assert training_client.optim_step(ZERO_LR).result().metrics["grad_norm"] == pytest.approx(
        expected, rel=1e-5
    )


def test_loaded_state_continues_training(service: tinker.ServiceClient) -> None:
    training_client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result()
    run_step(training_client)
    run_step(training_client)
    path = training_client.save_state("two").result().path
    assert path == f"tinker://{training_client.model_id}/weights/two"
    next_losses = [run_step(training_client), run_step(training_client)]
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert resumed.model_id != training_client.model_id
    assert [run_step(resumed), run_step(resumed)] == pytest.approx(next_losses, rel=1e-6)
    fresh = service.create_training_client_from_state(path).result()
    assert run_step(fresh) == pytest.approx(next_losses[0], rel=1e-6)
    assert run_step(fresh) != pytest.approx(next_losses[1], rel=1e-4)
    with pytest.warns(FutureWarning):
        assert training_client.load_state(path).result().path == path
    assert run_step(training_client) == pytest.approx(next_losses[0], rel=1e-6)


def test_old_client_resumes_with_create_model_and_load_weights(
    url: str, training_client: tinker.TrainingClient
) -> None:
    """Clients before tinker 0.38 create a model and load the weights into it."""
    run_step(training_client)
    path = training_client.save_state("one").result().path
    with RawTinkerClient(url, KEY) as raw:
        info = raw.post("weights_info", {"tinker_path": path}).json()
        model_id = raw.create_model(raw.create_session(), info["base_model"], rank=info["lora_rank"])
        request = {"model_id": model_id, "seq_id": 1, "session_id": None, "path": path, "optimizer": True}
        result = raw.retrieve_result(raw.submit("load_weights", request))
    assert result == {"type": "load_weights", "path": path, "model_id": model_id}


def test_failed_load_creates_no_model(url: str, training_client: tinker.TrainingClient) -> None:
    sampler_path = training_client.save_weights_for_sampler("sampler").result().path
    with RawTinkerClient(url, KEY) as raw:
        session_id = raw.create_session()
        request = {"session_id": session_id, "model_seq_id": 0, "path": sampler_path, "optimizer": False}
        result = raw.retrieve_result(raw.submit("load_weights", request))
        assert "was saved for sampling only" in result["error"]
        assert raw.post("get_info", {"model_id": f"{session_id}:train:0"}).status_code == 404


def test_load_with_a_model_and_a_session_is_rejected(
    url: str, training_client: tinker.TrainingClient
) -> None:
    path = training_client.save_state("state").result().path
    with RawTinkerClient(url, KEY) as raw:
        session_id = raw.create_session()
        model_id = raw.create_model(session_id, BASE_MODEL)
        ids = {"model_id": model_id, "seq_id": 1, "session_id": session_id, "model_seq_id": 1}
        response = raw.post("load_weights", {**ids, "path": path, "optimizer": False})
        assert response.status_code == 400
        assert "exclude each other" in response.json()["detail"]
        # The rejected request has consumed its sequence id, so the next one does not wait for it.
        request = {"model_id": model_id, "seq_id": 2, "path": path, "optimizer": False}
        assert raw.retrieve_result(raw.submit("load_weights", request))["type"] == "load_weights"


def test_sampling_client_of_unsupported_kind_is_rejected(
    url: str, training_client: tinker.TrainingClient
) -> None:
    request = {"model_id": training_client.model_id, "seq_id": 1, "path": "x", "kind": "inflight"}
    with RawTinkerClient(url, KEY) as raw:
        result = raw.retrieve_result(raw.submit("save_weights_for_sampler", request))
    assert result["error"] == "sampling client kind 'inflight' is not supported; use 'snapshot'"


def test_state_is_replaced_only_with_overwrite(training_client: tinker.TrainingClient) -> None:
    training_client.save_state("one").result()
    with pytest.raises(tinker.RequestFailedError, match="checkpoint 'one' already exists"):
        training_client.save_state("one").result()
    training_client.save_state("one", overwrite=True).result()


@pytest.mark.parametrize(
    ("data", "loss", "message"),
    [
        (
            [make_next_token_datum(mask=[1.0] * 5)],
            "cross_entropy",
            "datum 0: unknown loss_fn_inputs mask; cross_entropy supports",
        ),
        ([make_next_token_datum()], "gspo", "unknown loss_fn 'gspo'"),
        ([make_next_token_datum([5, 400])], "cross_entropy", "token id 400"),
        (
            [make_next_token_datum(list(range(3, 303)))],
            "cross_entropy",
            "datum 0 has 300 tokens; at most 256",
        ),
        ([make_next_token_datum(weights=[float("inf")] * 5)], "cross_entropy", r"loss is (inf|nan)"),
    ],
)
def test_invalid_data_is_reported_and_training_continues(
    training_client: tinker.TrainingClient, data: list[types.Datum], loss: Any, message: str
) -> None:
    with pytest.raises(tinker.RequestFailedError, match=message) as caught:
        training_client.forward_backward(data, loss).result(10)
    assert caught.value.category == types.RequestErrorCategory.User
    run_step(training_client)


def test_unsupported_optimizers_ranks_and_models_are_rejected(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match=r"unknown optimizer_config\.type 'dimuon'"):
        service.create_lora_training_client(BASE_MODEL, optimizer=types.DimuonOptimizerConfig()).result()
    with pytest.raises(tinker.RequestFailedError, match="rank must be between 1 and 16, got 64"):
        service.create_lora_training_client(BASE_MODEL, rank=64).result()
    with pytest.raises(tinker.RequestFailedError, match="unknown base_model 'another'"):
        service.create_lora_training_client("another", rank=4).result()


def test_learning_rate_may_be_zero_but_not_negative(training_client: tinker.TrainingClient) -> None:
    before = (
        training_client.forward_backward([make_next_token_datum()], "cross_entropy")
        .result()
        .metrics["loss:sum"]
    )
    training_client.optim_step(ZERO_LR).result()
    after = training_client.forward([make_next_token_datum()], "cross_entropy").result().metrics["loss:sum"]
    assert after == pytest.approx(before, rel=1e-6)
    with pytest.raises(tinker.RequestFailedError, match=r"adam_params\.learning_rate: "):
        training_client.optim_step(types.AdamParams(learning_rate=-1.0)).result()
