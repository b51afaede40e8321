"""An engine that takes weights in as vLLM's workers do, over a small model that fuses some of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from instar.backends.base import Backend, BackendCapabilities
from instar.engines.base import Engine, EngineInfo, EngineStatus, Prompt, WeightTransfer
from instar.engines.vllm.extension import StagedWeights, load_in_place
from instar.errors import EngineError
from instar.types import Json, Policy, SamplingParams, TokenChunk

SHAPES = {"embed.weight": (10, 4), "q.weight": (4, 4), "k.weight": (2, 4), "norm.weight": (4,)}


class FusedModel(nn.Module):
    """q and k are one parameter, as in vLLM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.qk = nn.Linear(4, 6, bias=False)
        self.norm = nn.RMSNorm(4)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = set()
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name in ("q.weight", "k.weight"):
                start, rows = (0, 4) if name == "q.weight" else (4, 2)
                parameters["qk.weight"].data.narrow(0, start, rows).copy_(tensor)
                loaded.add("qk.weight")
            else:
                parameters[name].data.copy_(tensor)
                loaded.add(name)
        return loaded

    def unfused(self) -> dict[str, Tensor]:
        qk = self.qk.weight.data
        return {
            "embed.weight": self.embed.weight.data,
            "q.weight": qk[:4],
            "k.weight": qk[4:],
            "norm.weight": self.norm.weight.data,
        }


class WeightReceivingEngine(Engine):
    def __init__(self, *, routes: tuple[Any, ...] = ("ipc", "ray"), failing: str = "") -> None:
        """``failing``: ``stage`` or ``commit``."""
        self.model = FusedModel()
        self.version = 0
        self.failing = failing
        self.sent = 0
        """Bytes of JSON that came."""
        self._inbox = StagedWeights()
        self._routes = routes

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("receiving", "none", 1, 1, ("base", "adapter", "weights"), routes=self._routes)

    def generate(self, prompt_ids: Prompt, params: SamplingParams) -> AsyncGenerator[TokenChunk, None]:
        raise EngineError("it only takes weights")

    async def load(self, policy: Policy) -> None:
        self.version = policy.version

    async def stage(self, transfer: WeightTransfer) -> Json:
        if self.failing == "stage":
            raise EngineError("no room")
        text = msgspec.json.encode(transfer.body)
        self.sent += len(text)
        key = f"{transfer.policy.policy_id}:{transfer.policy.version}"
        told = self._inbox.receive(msgspec.json.decode(text) | {"key": key}, torch.device("cpu"))
        return told | {"workers": [told]}

    async def commit(self, policy: Policy) -> None:
        if self.failing == "commit":
            raise EngineError("the GPU is gone")
        mapped = self._inbox.mapped
        if mapped and mapped.plan:
            mapped.plan.run()
        else:
            plan = load_in_place(self.model, self._inbox.weights, mapped.buffer if mapped else None)
            if mapped:
                mapped.plan = plan
        self._inbox.clear()
        self.version = policy.version

    @property
    def copies_straight(self) -> bool:
        return self._inbox.mapped is not None and self._inbox.mapped.plan is not None

    async def status(self) -> EngineStatus:
        return EngineStatus(self.version)

    async def close(self) -> None: ...


class WeightSendingBackend(Backend):
    """Hands out weights that are all ``value``."""

    value = 0.0

    @property
    def capabilities(self) -> BackendCapabilities:
        return BackendCapabilities(frozenset(), frozenset({"weights"}), live=True)

    async def tensors(self) -> AsyncGenerator[tuple[str, Tensor], None]:
        for place, (name, shape) in enumerate(SHAPES.items()):
            yield name, torch.full(shape, self.value + place)

    async def _never(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("it does not train")

    forward = forward_backward = optim_step = publish = save_state = load_state = _never

    async def close(self) -> None: ...


def has_weights(engine: WeightReceivingEngine, value: float) -> bool:
    expected = {name: torch.full(shape, value + place) for place, (name, shape) in enumerate(SHAPES.items())}
    return all(torch.equal(tensor, expected[name]) for name, tensor in engine.model.unfused().items())
