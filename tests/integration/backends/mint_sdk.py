"""Train and sample with MinT's SDK, and print the results as JSON.

Runs in an environment with MinT installed. The service's URL and key are read from MINT_BASE_URL and
MINT_API_KEY. The argument is the name of the base model.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import mint  # pyright: ignore[reportMissingImports] - installed only in the MinT environment
import torch
from mint import types  # pyright: ignore[reportMissingImports]

TOKENS = [5, 9, 20, 33, 47, 61]
ADAM = types.AdamParams(learning_rate=1e-2)


def make_datum(**tensors: list[float]) -> Any:
    floats = {name: types.TensorData(data=values, dtype="float32") for name, values in tensors.items()}
    targets = types.TensorData(data=TOKENS[1:], dtype="int64")
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": targets, **floats},
    )


def step(training_client: Any) -> float:
    future = training_client.forward_backward([make_datum()], "cross_entropy")
    training_client.optim_step(ADAM).result()
    return future.result().metrics["loss:sum"]


def run_pass_with_both_encodings(service: Any, training_client: Any) -> list[list[float]]:
    """Return the results of the same pass, sent as protobuf, which the server prefers, and as JSON."""
    results: list[list[float]] = []
    server_config = service.holder.get_client_config()
    assert server_config.proto_write_fwdbwd
    for config in (server_config, server_config.model_copy(update={"proto_write_fwdbwd": False})):
        service.holder._client_config = config
        data = [make_datum(weights=[0.5, 0.25, 1.0, 1.0, 2.0])]
        output = training_client.forward_backward(data, "cross_entropy").result()
        results.append([output.metrics["loss:sum"], *output.loss_fn_outputs[0]["logprobs"].data])
    service.holder._client_config = server_config
    return results


def compute_custom_loss(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return -torch.cat(logprobs).sum(), {"mine": 1.0}


def main(base_model: str) -> dict[str, Any]:
    service = mint.ServiceClient()
    training_client = service.create_lora_training_client(base_model=base_model, rank=4, seed=3)
    results: dict[str, Any] = {"model_name": service.get_server_capabilities().supported_models[0].model_name}
    output = training_client.forward([make_datum()], "cross_entropy").result()
    results["forward"] = list(output.loss_fn_outputs[0]["logprobs"].data)
    results["losses"] = [step(training_client) for _ in range(3)]
    path = training_client.save_state("three").result().path
    results["uninterrupted"] = [step(training_client), step(training_client)]
    resumed = service.create_training_client_from_state_with_optimizer(path)
    results["resumed"] = [step(resumed), step(resumed)]
    results["protobuf_and_json"] = run_pass_with_both_encodings(service, training_client)
    training_client.optim_step(ADAM).result()
    results["custom"] = (
        training_client.forward_backward_custom([make_datum()], compute_custom_loss).result().metrics["mine"]
    )
    training_client.optim_step(ADAM).result()
    logprobs = (
        training_client.forward([make_datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    )
    results["policy"] = list(logprobs.data)
    ppo_data = [make_datum(logprobs=list(logprobs.data), advantages=[0.0, 1.0, -1.0, 2.0, 0.5])]
    results["ppo"] = training_client.forward_backward(ppo_data, "ppo").result().metrics["loss:sum"]
    sampling_client = training_client.save_weights_and_get_sampling_client()
    results["scored"] = sampling_client.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    params = types.SamplingParams(max_tokens=4, seed=1)
    reply = sampling_client.sample(types.ModelInput.from_ints(TOKENS), 2, params).result()
    results["sampled"] = [[len(s.tokens), len(s.logprobs or [])] for s in reply.sequences]
    results["text"] = training_client.get_tokenizer().decode(training_client.get_tokenizer().encode("hello"))
    rest_client = service.create_rest_client()
    results["checkpoints"] = [
        c.checkpoint_id for c in rest_client.list_checkpoints(training_client.model_id).result().checkpoints
    ]
    try:
        training_client.forward_backward([make_datum(mask=[1.0] * 5)], "cross_entropy").result()
    except mint.RequestFailedError as error:
        results["error"] = str(error)
    return results


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
