"""Calls what a program of MinT's would, and prints what came of it as JSON.

Run by the interpreter of an environment that has MinT. Its address and key are in MINT_BASE_URL and
MINT_API_KEY; the base model's name is the first argument.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import mint  # pyright: ignore[reportMissingImports] - of another environment
import torch
from mint import types  # pyright: ignore[reportMissingImports]

TOKENS = [5, 9, 20, 33, 47, 61]
ADAM = types.AdamParams(learning_rate=1e-2)


def datum(**tensors: list[float]) -> Any:
    floats = {name: types.TensorData(data=values, dtype="float32") for name, values in tensors.items()}
    targets = types.TensorData(data=TOKENS[1:], dtype="int64")
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": targets, **floats},
    )


def step(training: Any) -> float:
    both = training.forward_backward([datum()], "cross_entropy")
    training.optim_step(ADAM).result()
    return both.result().metrics["loss:sum"]


def both_ways(service: Any, training: Any) -> list[list[float]]:
    """What a pass answers: first as the server asks for it to be sent, in protobuf, then in JSON."""
    answers: list[list[float]] = []
    asked_for = service.holder.get_client_config()
    assert asked_for.proto_write_fwdbwd
    for config in (asked_for, asked_for.model_copy(update={"proto_write_fwdbwd": False})):
        service.holder._client_config = config
        data = [datum(weights=[0.5, 0.25, 1.0, 1.0, 2.0])]
        done = training.forward_backward(data, "cross_entropy").result()
        answers.append([done.metrics["loss:sum"], *done.loss_fn_outputs[0]["logprobs"].data])
    service.holder._client_config = asked_for
    return answers


def own_loss(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return -torch.cat(logprobs).sum(), {"mine": 1.0}


def main(name: str) -> dict[str, Any]:
    service = mint.ServiceClient()
    training = service.create_lora_training_client(base_model=name, rank=4, seed=3)
    reported: dict[str, Any] = {"served": service.get_server_capabilities().supported_models[0].model_name}
    ahead = training.forward([datum()], "cross_entropy").result()
    reported["forward"] = list(ahead.loss_fn_outputs[0]["logprobs"].data)
    reported["losses"] = [step(training) for _ in range(3)]
    path = training.save_state("three").result().path
    reported["straight"] = [step(training), step(training)]
    resumed = service.create_training_client_from_state_with_optimizer(path)
    reported["resumed"] = [step(resumed), step(resumed)]
    reported["both_ways"] = both_ways(service, training)
    training.optim_step(ADAM).result()
    reported["custom"] = training.forward_backward_custom([datum()], own_loss).result().metrics["mine"]
    training.optim_step(ADAM).result()
    old = training.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    reported["policy"] = list(old.data)
    ppo = [datum(logprobs=list(old.data), advantages=[0.0, 1.0, -1.0, 2.0, 0.5])]
    reported["ppo"] = training.forward_backward(ppo, "ppo").result().metrics["loss:sum"]
    sampling = training.save_weights_and_get_sampling_client()
    reported["scored"] = sampling.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    params = types.SamplingParams(max_tokens=4, seed=1)
    reply = sampling.sample(types.ModelInput.from_ints(TOKENS), 2, params).result()
    reported["sampled"] = [[len(s.tokens), len(s.logprobs or [])] for s in reply.sequences]
    reported["text"] = training.get_tokenizer().decode(training.get_tokenizer().encode("hello"))
    rest = service.create_rest_client()
    reported["listed"] = [
        c.checkpoint_id for c in rest.list_checkpoints(training.model_id).result().checkpoints
    ]
    try:
        training.forward_backward([datum(mask=[1.0] * 5)], "cross_entropy").result()
    except mint.RequestFailedError as error:
        reported["refused"] = str(error)
    return reported


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
