"""Training through the real SDK, over a socket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.sdk_leaks import IGNORE_SDK_LEAKS
from tests.unit.protocol.tinker.conftest import NAME
from tests.unit.protocol.tinker.test_passes import datum

ADAM = types.AdamParams(learning_rate=1e-2)
STAY = types.AdamParams(learning_rate=0.0)
TOKENS = [5, 9, 20, 33, 47, 61]
RATIO_LOSSES: list[Any] = ["importance_sampling", "ppo", "cispo", "dro"]

pytestmark = IGNORE_SDK_LEAKS


def next_tokens(tokens: list[int] = TOKENS, **tensors: list[float]) -> types.Datum:
    return datum(tokens[:-1], target_tokens=tokens[1:], **tensors)


def logprobs(output: types.ForwardBackwardOutput, index: int = 0) -> np.ndarray[Any, Any]:
    return np.asarray(output.loss_fn_outputs[index]["logprobs"].data)


def step(training: tinker.TrainingClient) -> float:
    """Pipelined: the second is sent before the first is done. The loss before it."""
    both = training.forward_backward([next_tokens()], "cross_entropy")
    stepped = training.optim_step(ADAM)
    assert stepped.result().metrics["grad_norm"] > 0
    return both.result().metrics["loss:sum"]


def test_server_capabilities_name_the_base_model(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    [model] = service.get_server_capabilities().supported_models
    assert (model.model_name, model.max_context_length, model.trainable) == (NAME, 256, True)
    info = training.get_info()
    assert (info.model_id, info.lora_rank, info.is_lora) == (training.model_id, 4, True)
    tokenizer = training.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_training_reduces_the_loss(training: tinker.TrainingClient) -> None:
    losses = [step(training) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]


def test_loss_matches_the_logprobs(training: tinker.TrainingClient) -> None:
    weights = [0.0, 1.0, 0.5, 0.0, 2.0]
    data = [next_tokens(weights=weights), next_tokens([7, 8, 9])]
    ahead = training.forward(data, "cross_entropy").result()
    both = training.forward_backward(data, "cross_entropy").result()
    np.testing.assert_allclose(logprobs(ahead), logprobs(both), rtol=1e-5)
    expected = -(logprobs(both) @ weights) - logprobs(both, 1).sum()
    assert both.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
    assert ahead.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", RATIO_LOSSES)
def test_ratio_losses_use_old_logprobs(training: tinker.TrainingClient, loss: Any) -> None:
    old = logprobs(training.forward([next_tokens()], "cross_entropy").result())
    data = [next_tokens(logprobs=(old - 0.1).tolist(), advantages=[0.0, 1.0, -1.0, 2.0, 0.5])]
    output = training.forward_backward(data, loss).result()
    np.testing.assert_allclose(logprobs(output), old, rtol=1e-5)
    ratio, advantages = np.exp(0.1), np.array([0.0, 1.0, -1.0, 2.0, 0.5])
    expected = {
        "importance_sampling": -ratio * advantages.sum(),
        "ppo": -ratio * advantages.sum(),
        "cispo": -ratio * (advantages * old).sum(),
        "dro": -(advantages * old - 0.025 * 0.1**2).sum(),
    }
    assert output.metrics["loss:sum"] == pytest.approx(expected[loss], rel=1e-4)
    clipped = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.0} if loss in ("ppo", "cispo") else None
    assert training.forward_backward(data, loss, clipped).result().metrics.keys() == output.metrics.keys()


def test_many_pass_chunks_out_of_order_are_combined(training: tinker.TrainingClient) -> None:
    """The SDK sends the first of several chunks last."""
    count = 2100
    alone = training.forward([next_tokens([7, 8])], "cross_entropy").result().metrics["loss:sum"]
    output = training.forward_backward([next_tokens([7, 8])] * count, "cross_entropy").result()
    training.optim_step(ADAM).result()
    assert len(output.loss_fn_outputs) == count
    assert output.metrics["loss:sum"] == pytest.approx(count * alone, rel=1e-4)


def test_custom_loss_is_computed_by_the_client(training: tinker.TrainingClient) -> None:
    def loss(data: list[types.Datum], lps: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -sum(lp.sum() for lp in lps), {"mine": 1.0}  # pyright: ignore

    output = training.forward_backward_custom([next_tokens()], loss).result()
    assert output.metrics["mine"] == 1.0
    of_its_own = training.optim_step(STAY).result().metrics["grad_norm"]
    training.forward_backward([next_tokens()], "cross_entropy")
    assert training.optim_step(STAY).result().metrics["grad_norm"] == pytest.approx(of_its_own, rel=1e-5)


def test_loaded_state_continues_training(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(NAME, rank=4, seed=3)
    step(training), step(training)
    path = training.save_state("two").result().path
    assert path == f"tinker://{training.model_id}/weights/two"
    after = [step(training), step(training)]
    resumed = service.create_training_client_from_state_with_optimizer(path)
    assert resumed.model_id != training.model_id
    assert [step(resumed), step(resumed)] == pytest.approx(after, rel=1e-6)
    fresh = service.create_training_client_from_state(path)
    assert step(fresh) == pytest.approx(after[0], rel=1e-6)
    assert step(fresh) != pytest.approx(after[1], rel=1e-4)
    with pytest.warns(FutureWarning):
        assert training.load_state(path).result().path == path
    assert step(training) == pytest.approx(after[0], rel=1e-6)


def test_state_is_replaced_only_with_overwrite(training: tinker.TrainingClient) -> None:
    training.save_state("one").result()
    with pytest.raises(tinker.RequestFailedError, match="the checkpoint 'one' already exists"):
        training.save_state("one").result()
    training.save_state("one", overwrite=True).result()


@pytest.mark.parametrize(
    ("data", "loss", "says"),
    [
        (
            [next_tokens(mask=[1.0] * 5)],
            "cross_entropy",
            "datum 0: loss_fn_inputs has mask; cross_entropy supports",
        ),
        ([next_tokens()], "gspo", "loss_fn: received 'gspo'"),
        ([next_tokens([5, 400])], "cross_entropy", "token id 400"),
        ([next_tokens(list(range(3, 303)))], "cross_entropy", "datum 0 has 300 tokens; at most 256"),
        ([next_tokens(weights=[float("inf")] * 5)], "cross_entropy", "loss is inf|nan"),
    ],
)
def test_invalid_data_is_reported_and_training_continues(
    training: tinker.TrainingClient, data: list[types.Datum], loss: Any, says: str
) -> None:
    with pytest.raises(tinker.RequestFailedError, match=says) as raised:
        training.forward_backward(data, loss).result(10)
    assert raised.value.category == types.RequestErrorCategory.User
    step(training)


def test_unsupported_optimizers_ranks_and_models_are_rejected(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match=r"optimizer_config\.type: received 'dimuon'"):
        service.create_lora_training_client(NAME, optimizer=types.DimuonOptimizerConfig())
    with pytest.raises(tinker.RequestFailedError, match="rank: received 64; allowed: 1 to 16"):
        service.create_lora_training_client(NAME, rank=64)
    with pytest.raises(tinker.RequestFailedError, match="base_model: received 'another'"):
        service.create_lora_training_client("another", rank=4)


def test_learning_rate_of_zero_changes_nothing(training: tinker.TrainingClient) -> None:
    before = training.forward_backward([next_tokens()], "cross_entropy").result().metrics["loss:sum"]
    training.optim_step(STAY).result()
    after = training.forward([next_tokens()], "cross_entropy").result().metrics["loss:sum"]
    assert after == pytest.approx(before, rel=1e-6)
    with pytest.raises(tinker.RequestFailedError, match=r"adam_params\.learning_rate: "):
        training.optim_step(types.AdamParams(learning_rate=-1.0)).result()
