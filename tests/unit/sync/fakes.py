"""A fake engine that receives weights like a vLLM worker, and a fake backend that sends weights."""

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
from instar.types import Json, Policy, PolicyRef, SamplingParams, TokenChunk

SHAPES = {"embed.weight": (10, 4), "q.weight": (4, 4), "k.weight": (2, 4), "norm.weight": (4,)}


class FusedModel(nn.Module):
    """A small model with q and k fused into one parameter, as in vLLM."""

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

    def get_unfused_weights(self) -> dict[str, Tensor]:
        qk = self.qk.weight.data
        return {
            "embed.weight": self.embed.weight.data,
            "q.weight": qk[:4],
            "k.weight": qk[4:],
            "norm.weight": self.norm.weight.data,
        }


class WeightReceivingEngine(Engine):
    def __init__(self, *, routes: tuple[Any, ...] = ("ipc", "ray"), failing_method: str = "") -> None:
        """``failing_method`` is the method that raises: ``stage``, ``commit`` or empty for neither."""
        self.model = FusedModel()
        self.version = 0
        self.failing_method = failing_method
        self.received_bytes = 0
        """The total size of the received transfer bodies as JSON."""
        self._staged = StagedWeights()
        self._routes = routes

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("receiving", "none", 1, 1, ("base", "adapter", "weights"), routes=self._routes)

    def generate(
        self, prompt_ids: Prompt, params: SamplingParams, policy: PolicyRef | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        raise EngineError("this engine only receives weights")

    async def load(self, policy: Policy) -> None:
        self.version = policy.version

    async def stage(self, transfer: WeightTransfer) -> Json:
        if self.failing_method == "stage":
            raise EngineError("out of memory")
        body = msgspec.json.encode(transfer.body)
        self.received_bytes += len(body)
        key = f"{transfer.policy.policy_id}:{transfer.policy.version}"
        result = self._staged.receive(msgspec.json.decode(body) | {"key": key}, torch.device("cpu"))
        return result | {"workers": [result]}

    async def commit(self, policy: Policy) -> None:
        if self.failing_method == "commit":
            raise EngineError("the GPU failed")
        mapped = self._staged.mapped_buffer
        if mapped and mapped.copy_plan:
            mapped.copy_plan.run()
        else:
            plan = load_in_place(self.model, self._staged.weights, mapped.buffer if mapped else None)
            if mapped:
                mapped.copy_plan = plan
        self._staged.clear()
        self.version = policy.version

    @property
    def has_copy_plan(self) -> bool:
        return self._staged.mapped_buffer is not None and self._staged.mapped_buffer.copy_plan is not None

    async def status(self) -> EngineStatus:
        return EngineStatus(self.version)

    async def close(self) -> None: ...


class WeightSendingBackend(Backend):
    """Sends weights that are filled with ``value`` plus the weight's index."""

    value = 0.0

    @property
    def capabilities(self) -> BackendCapabilities:
        return BackendCapabilities(frozenset(), frozenset({"weights"}), can_sync_live=True)

    async def tensors(self) -> AsyncGenerator[tuple[str, Tensor], None]:
        for index, (name, shape) in enumerate(SHAPES.items()):
            yield name, torch.full(shape, self.value + index)

    async def _raise_error(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("this backend does not train")

    forward = forward_backward = optim_step = publish = save_state = load_state = _raise_error

    async def close(self) -> None: ...


def has_weights(engine: WeightReceivingEngine, value: float) -> bool:
    expected = {name: torch.full(shape, value + index) for index, (name, shape) in enumerate(SHAPES.items())}
    return all(
        torch.equal(tensor, expected[name]) for name, tensor in engine.model.get_unfused_weights().items()
    )
