"""Tests for selecting the sync route from a backend to its engines."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from instar.backends.base import BackendCapabilities
from instar.config import RunConfig
from instar.errors import ConfigError
from instar.sync.factory import create_sync_route
from instar.sync.files import FileSync
from instar.sync.shared import SharedSync
from tests.unit.sync.fakes import WeightReceivingEngine, WeightSendingBackend


class AdapterBackend(WeightSendingBackend):
    @property
    def capabilities(self) -> BackendCapabilities:
        return BackendCapabilities(frozenset(), frozenset({"adapter"}))


class OtherMachineEngine(WeightReceivingEngine):
    """An engine that cannot map the trainer's memory."""

    async def stage(self, transfer: Any) -> Any:
        return {"workers": [{"content": "00", "gpu": None}]}


def make_config(route: str = "auto", **sections: Any) -> RunConfig:
    model = {"name": "tiny", "device": "cpu", "dtype": "fp32"}
    return RunConfig.model_validate({"model": model, "sync": {"route": route}, **sections})


async def test_create_sync_route_selects_files_if_no_other_route_is_supported() -> None:
    sync = await create_sync_route(make_config(), AdapterBackend(), [WeightReceivingEngine(routes=())])
    assert isinstance(sync, FileSync)
    assert sync.description.startswith("files")
    assert not sync.is_live


async def test_create_sync_route_shares_cpu_memory_only_if_configured() -> None:
    assert isinstance(
        await create_sync_route(make_config(), WeightSendingBackend(), [WeightReceivingEngine()]), FileSync
    )
    sync = await create_sync_route(make_config("ipc"), WeightSendingBackend(), [WeightReceivingEngine()])
    assert isinstance(sync, SharedSync)
    assert sync.is_live
    assert "main memory" in sync.description


@pytest.mark.parametrize(
    ("route", "backend", "engine", "message"),
    [
        ("ipc", AdapterBackend(), WeightReceivingEngine(), "cannot export its weights as tensors"),
        ("ipc", WeightSendingBackend(), WeightReceivingEngine(routes=()), "does not accept weights over ipc"),
        ("ipc", WeightSendingBackend(), OtherMachineEngine(), "a different machine"),
        ("nccl", WeightSendingBackend(), WeightReceivingEngine(routes=("nccl",)), "runs on a CPU"),
        (
            "ray",
            WeightSendingBackend(),
            WeightReceivingEngine(routes=("ipc",)),
            "does not accept weights over ray",
        ),
    ],
)
async def test_create_sync_route_rejects_an_unsupported_route(
    route: str, backend: WeightSendingBackend, engine: WeightReceivingEngine, message: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"sync.route: '{route}' cannot be used: .*{message}.*Available: .*files"
    ):
        await create_sync_route(make_config(route), backend, [engine])


async def test_create_sync_route_requires_a_route_to_every_engine() -> None:
    class RemoteOnlyEngine(WeightReceivingEngine):
        @property
        def info(self) -> Any:
            return msgspec.structs.replace(super().info, artifacts=("base", "remote"))

    with pytest.raises(
        ConfigError, match=r"the backend publishes adapter, but the .* engine loads only base, remote"
    ):
        await create_sync_route(
            make_config(), AdapterBackend(), [WeightReceivingEngine(), RemoteOnlyEngine()]
        )
