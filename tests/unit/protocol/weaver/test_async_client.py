"""Tests for the SDK's asyncio client, with concurrent calls that arrive in any order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from weaver import AsyncServiceClient, AsyncTrainingClient
from weaver.operations import WeaverOperationError
from weaver.training_pipeline import SubmitAheadQueue
from weaver.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams

from tests.unit.protocol.weaver.conftest import BASE_MODEL, KEY

ADAM = AdamParams(learning_rate=0.01, eps=1e-8, weight_decay=0.0)


@pytest.fixture
async def service(server: str) -> AsyncGenerator[AsyncServiceClient]:
    async with AsyncServiceClient(base_url=server, api_key=KEY) as client:
        yield client


async def create_model(service: AsyncServiceClient) -> AsyncTrainingClient:
    return await service.create_model(
        base_model=BASE_MODEL, lora_config=LoraConfig(rank=4, seed=1, train_unembed=False)
    )


def make_datum(first: int) -> Datum:
    ids = list(range(first, first + 12))
    return Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], "weights": [1.0] * 11})


def get_loss(result: Any) -> float:
    return result["result"]["metrics"]["loss"]


async def train_sequentially(trainer: AsyncTrainingClient, steps: int) -> list[float]:
    losses: list[float] = []
    for step in range(steps):
        losses.append(get_loss(await trainer.forward_backward([make_datum(20 + step)], "cross_entropy")))
        await trainer.optim_step(ADAM)
    return losses


async def test_concurrent_calls_take_effect_in_order(service: AsyncServiceClient) -> None:
    sequential, concurrent = await create_model(service), await create_model(service)
    expected = await train_sequentially(sequential, 4)

    async def call(index: int) -> Any:
        step, is_optim_step = divmod(index, 2)
        if is_optim_step:
            return await concurrent.optim_step(ADAM)
        return await concurrent.forward_backward([make_datum(20 + step)], "cross_entropy")

    results = await asyncio.gather(*(call(index) for index in range(8)))
    assert [get_loss(result) for result in results[::2]] == expected


async def test_sequence_ids_may_arrive_in_any_order(service: AsyncServiceClient) -> None:
    sequential, concurrent = await create_model(service), await create_model(service)
    expected = await train_sequentially(sequential, 3)
    path = f"/api/v1/models/{concurrent.model_id}"

    async def send(seq: int) -> Any:
        await asyncio.sleep((7 - seq) * 0.02)
        payload: dict[str, Any] = {"seq_id": seq, "adam_params": ADAM.to_payload()}
        if seq % 2 == 0:
            return await service.enqueue_operation(f"{path}/optimizer-steps", {"payload": payload})
        data = [make_datum(20 + seq // 2).to_payload()]
        payload = {"seq_id": seq, "forward_backward_input": {"loss_fn": "cross_entropy", "data": data}}
        return await service.enqueue_operation(f"{path}/forward-backward-passes", {"payload": payload})

    handles = await asyncio.gather(*(send(seq) for seq in range(1, 7)))
    assert [get_loss(await handle) for handle in handles[::2]] == expected


async def test_save_runs_after_earlier_calls(service: AsyncServiceClient) -> None:
    trainer = await create_model(service)
    path = f"/api/v1/models/{trainer.model_id}"
    step = {"payload": {"seq_id": 2, "adam_params": ADAM.to_payload()}}
    step_task = asyncio.create_task(service.enqueue_operation(f"{path}/optimizer-steps", step))
    await asyncio.sleep(0.1)
    save_task = asyncio.create_task(trainer.save_state(name="stepped"))
    await asyncio.sleep(0.2)
    # The step waits for this pass.
    await trainer.forward_backward([make_datum(20)], "cross_entropy")
    await step_task
    saved, resumed = await save_task, await create_model(service)
    fresh = await resumed.forward([make_datum(20)], "cross_entropy")
    await resumed.load_state(saved)
    loaded = await resumed.forward([make_datum(20)], "cross_entropy")
    trainer._next_seq()  # skips the sequence id of the request that this test sent itself
    trained = await trainer.forward([make_datum(20)], "cross_entropy")
    assert get_loss(loaded) == get_loss(trained)
    assert get_loss(loaded) != get_loss(fresh)


async def test_sdk_pipeline_trains_like_sequential_calls(service: AsyncServiceClient) -> None:
    expected = await train_sequentially(await create_model(service), 4)
    queue = SubmitAheadQueue(await create_model(service), submit_ahead=1)
    results: list[Any] = []
    for step in range(4):
        await queue.submit(step, [make_datum(20 + step)], ADAM)
        results.append(await queue.wait_for_room())
    results += await queue.drain()
    assert [get_loss(step.forward_backward) for step in results if step is not None] == expected


async def test_custom_loss_is_computed_by_the_client(service: AsyncServiceClient) -> None:
    custom_model, built_in_model = await create_model(service), await create_model(service)
    data = [make_datum(20), make_datum(60)]

    def compute_loss(
        passed_data: Sequence[Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        assert len(passed_data) == len(logprobs) == 2
        return -sum((row.sum() for row in logprobs), torch.zeros(())), {"rows": len(logprobs)}

    for _ in range(2):
        custom = await custom_model.forward_backward_custom(data, compute_loss)
        result = await built_in_model.forward_backward(data, "cross_entropy")
        assert custom["metrics"] == {"rows": 2}
        assert float(custom["loss"]) == pytest.approx(get_loss(result), rel=1e-5)
        norms = [
            (await client.optim_step(ADAM))["metrics"]["grad_norm"]
            for client in (custom_model, built_in_model)
        ]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


async def test_models_and_samplers_work_concurrently(service: AsyncServiceClient) -> None:
    async def train_and_sample(first: int) -> list[int]:
        trainer = await create_model(service)
        for _ in range(12):
            await trainer.forward_backward([make_datum(first)], "cross_entropy")
            await trainer.optim_step(ADAM)
        sampler = await trainer.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=5, temperature=0.0)
        prompt = ModelInput.from_ints(list(range(first, first + 4)))
        replies = await asyncio.gather(
            *(sampler.sample(prompt=prompt, sampling_params=params) for _ in range(3))
        )
        assert await sampler.compute_logprobs(prompt=prompt)
        assert len({tuple(reply["sequences"][0]["tokens"]) for reply in replies}) == 1
        return replies[0]["sequences"][0]["tokens"]

    starts = (20, 100, 200)
    for first, tokens in zip(starts, await asyncio.gather(*map(train_and_sample, starts)), strict=True):
        assert tokens == list(range(first + 4, first + 9))


async def test_sdk_aligns_outputs_with_their_data(service: AsyncServiceClient) -> None:
    from weaver import align_training_outputs

    trainer = await create_model(service)
    data = [make_datum(20).with_loss_fn_inputs({"loss_mask": [0.0] * 5 + [1.0] * 6}), make_datum(60)]
    data[0].datum_id = "first"
    result = await trainer.forward_backward(data, "cross_entropy")
    aligned: list[Any] = list(align_training_outputs(data, result))
    logprobs = np.array(aligned[0]["logprobs"]["data"])
    assert np.isnan(logprobs[:5]).all()
    assert (logprobs[5:] < 0).all()


async def test_failed_operation_handles_raise(service: AsyncServiceClient) -> None:
    trainer = await create_model(service)
    handle = await trainer.forward_backward([make_datum(20)], "unknown_loss", wait=False)
    assert handle.done()
    with pytest.raises(WeaverOperationError, match="unknown_loss"):
        await handle
    await trainer.forward_backward([make_datum(20)], "cross_entropy")
