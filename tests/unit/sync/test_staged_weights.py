"""Tests for weights that an engine receives in chunks, possibly more than once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from instar.engines.base import WeightTransfer
from instar.engines.vllm import extension
from instar.engines.vllm.client import VllmClient
from instar.engines.vllm.merge import read_shapes
from instar.engines.vllm.weights import ServerWeights, TransferReceiver
from instar.errors import EngineError
from instar.types import Artifact, Policy
from tests.tiny import make_tiny_model
from tests.unit.engines.fake_vllm import StatefulFakeVllm


def test_staged_weights_restart_if_a_policy_is_sent_again() -> None:
    def fetch(body: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        return [(f"w{body['chunk']}", torch.zeros(1))]

    staged = extension.StagedWeights(fetch_chunk=fetch)

    def send(chunk_count: int) -> list[int]:
        bodies = ({"key": "run:5", "chunk": chunk} for chunk in range(chunk_count))
        return [staged.receive(body, torch.device("cpu"))["chunks"] for body in bodies]

    assert send(2) == [1, 2]
    for _ in range(2):
        assert send(3) == [1, 2, 3]
        assert [name for name, _ in staged.weights] == ["w0", "w1", "w2"]


async def test_commit_requires_all_chunks_of_the_last_attempt(tmp_path: Path) -> None:
    tiny = make_tiny_model(tmp_path / "tiny")
    layout = [[name, "float32", list(shape)] for name, shape in read_shapes(tiny).items()]
    policy = Policy("run", 5, Artifact("live"))
    async with StatefulFakeVllm(tiny).serving() as server:
        client = VllmClient(server.url)
        receiver = TransferReceiver(ServerWeights(client), tiny)

        async def send(chunk: int, part: list[list[Any]]) -> None:
            await receiver.stage(WeightTransfer(policy, "ray", {"chunk": chunk, "layout": part}))

        await send(0, layout[:2])
        await send(1, layout[2:])
        await send(0, layout[:2])
        with pytest.raises(EngineError, match="did not arrive"):
            await receiver.commit(policy)
        await send(1, layout[2:])
        await receiver.commit(policy)
        await client.close()
