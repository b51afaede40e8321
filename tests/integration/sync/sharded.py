"""Run one of two ranks of a model that is sharded with FSDP2 over gloo.

    sharded.py MODEL URL TOKEN RAY_ADDRESS

Both ranks gather one parameter at a time. Rank 0 sends the weights to the engine at URL through Ray, and then
prints the logprobs that the model computed before it was sharded.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from instar.backends.base import Backend, BackendCapabilities
from instar.backends.weight_export import iterate_served_weights
from instar.engines.remote import RemoteEngine
from instar.sync.ray import RaySync
from instar.types import Artifact, Policy

TOKEN_IDS = list(range(5, 45))


class ShardedBackend(Backend):
    """Yields gathered weights. The other rank must iterate over them at the same time."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    @property
    def capabilities(self) -> BackendCapabilities:
        return BackendCapabilities(frozenset(), frozenset({"weights"}), can_sync_live=True)

    async def tensors(self) -> AsyncGenerator[tuple[str, Tensor], None]:
        for name, tensor in gather_weights(self._model):
            assert not isinstance(tensor, DTensor)
            yield name, tensor

    async def _fail(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("this backend does not train")

    forward = forward_backward = optim_step = publish = save_state = load_state = close = _fail


def gather_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from iterate_served_weights(model, torch.float32)


def build_sharded_model(folder: str) -> tuple[torch.nn.Module, list[float]]:
    """Return the sharded model, which is the same on every rank, and its logprobs before sharding."""
    torch.manual_seed(7)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora_config = peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(model, lora_config)
    with torch.no_grad():
        ids = torch.tensor(TOKEN_IDS)
        vocabulary_logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    logprobs = vocabulary_logprobs.gather(1, ids[1:, None])[:, 0].tolist()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert sum(isinstance(parameter, DTensor) for parameter in model.parameters()) > 10
    assert any(p.to_local().numel() < p.numel() for p in model.parameters() if isinstance(p, DTensor))
    return model, logprobs


async def push(model: torch.nn.Module, url: str, token: str, address: str) -> None:
    engine = await RemoteEngine.connect(url, token)
    sync = RaySync(ShardedBackend(model), address=address, chunk_bytes=128 * 1024, timeout=120)
    await sync.start()
    outcomes = await sync.push(Policy("sharded", 11, Artifact("live")), [engine])
    assert outcomes == [None], outcomes
    await sync.close()
    await engine.close()


def main(folder: str, url: str, token: str, address: str) -> None:
    dist.init_process_group("gloo")
    model, logprobs = build_sharded_model(folder)
    if dist.get_rank() == 0:
        asyncio.run(push(model, url, token, address))
        print(json.dumps({"ids": TOKEN_IDS, "logprobs": logprobs}))
    else:
        for _ in gather_weights(model):
            pass
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
