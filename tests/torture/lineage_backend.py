"""A backend that records the samples its weights were trained on, independently of the store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instar.backends.base import ForwardBackwardResult, OptimStepResult
from instar.backends.local.backend import LocalBackend
from instar.config import AdamConfig, LocalBackendConfig, LossConfig, ModelConfig, PluginConfig
from instar.types import Artifact, Sample

LINEAGE_FILE = "lineage.json"


class LineageBackend(LocalBackend):
    """A local backend that saves the sample keys of every optimizer step with its state.

    Each call except `load_state` takes at least ``call_seconds``, a setting, to imitate a larger model.
    """

    def __init__(self, model: ModelConfig, config: PluginConfig, *, seed: int = 0) -> None:
        settings: dict[str, Any] = {"type": "local", **config.args}
        self._call_seconds: float = settings.pop("call_seconds", 0.0)
        super().__init__(model, LocalBackendConfig.model_validate(settings), seed=seed)
        self._call_lock = asyncio.Lock()
        """Keeps the calls of a step in order, although they are submitted concurrently."""
        self._submitted_keys: list[str] = []
        self._keys_by_step: list[list[str]] = []

    async def forward_backward(self, samples: Sequence[Sample], loss: LossConfig) -> ForwardBackwardResult:
        async with self._call_lock:
            await asyncio.sleep(self._call_seconds)
            self._submitted_keys += [sample.sample_key for sample in samples]
            return await super().forward_backward(samples, loss)

    async def optim_step(self, adam: AdamConfig) -> OptimStepResult:
        async with self._call_lock:
            await asyncio.sleep(self._call_seconds)
            result = await super().optim_step(adam)
            self._keys_by_step.append(self._submitted_keys)
            self._submitted_keys = []
            return result

    async def save_state(self, path: Path) -> None:
        await asyncio.sleep(self._call_seconds)
        await super().save_state(path)
        (path / LINEAGE_FILE).write_text(json.dumps(self._keys_by_step))

    async def publish(self, path: Path) -> Artifact:
        await asyncio.sleep(self._call_seconds)
        return await super().publish(path)

    async def load_state(self, path: Path, *, optimizer: bool = True) -> None:
        await super().load_state(path, optimizer=optimizer)
        self._keys_by_step = read_lineage(path)
        self._submitted_keys = []


def read_lineage(state_folder: Path) -> list[list[str]]:
    """Return the sample keys of every optimizer step in a saved state."""
    return json.loads((state_folder / LINEAGE_FILE).read_text())
