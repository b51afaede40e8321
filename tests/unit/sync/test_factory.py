"""Which way weights take, by what the two ends are."""

from __future__ import annotations

from typing import Any

import pytest

from instar.backends.base import BackendCapabilities
from instar.config import RunConfig
from instar.errors import ConfigError
from instar.sync.factory import create_sync
from instar.sync.files import FileSync
from instar.sync.nccl import meeting
from instar.sync.shared import SharedSync
from tests.unit.sync.fakes import HandingBackend, ReceivingEngine


class AdapterBackend(HandingBackend):
    @property
    def capabilities(self) -> BackendCapabilities:
        return BackendCapabilities(frozenset(), frozenset({"adapter"}))


class FarEngine(ReceivingEngine):
    """On another machine: what it maps is something else."""

    async def stage(self, transfer: Any) -> Any:
        return {"workers": [{"content": "00", "gpu": None}]}


def config(route: str = "auto", **more: Any) -> RunConfig:
    model = {"name": "tiny", "device": "cpu", "dtype": "fp32"}
    return RunConfig.model_validate({"model": model, "sync": {"route": route}, **more})


async def test_files_where_nothing_else_is_better() -> None:
    sync = await create_sync(config(), AdapterBackend(), [ReceivingEngine(routes=())])
    assert isinstance(sync, FileSync)
    assert sync.route.startswith("files")
    assert not sync.live


async def test_on_a_cpu_memory_is_shared_only_when_asked_for() -> None:
    assert isinstance(await create_sync(config(), HandingBackend(), [ReceivingEngine()]), FileSync)
    sync = await create_sync(config("ipc"), HandingBackend(), [ReceivingEngine()])
    assert isinstance(sync, SharedSync)
    assert sync.live
    assert "the machine's memory" in sync.route


@pytest.mark.parametrize(
    ("route", "backend", "engine", "why"),
    [
        ("ipc", AdapterBackend(), ReceivingEngine(), "does not hand out its weights"),
        ("ipc", HandingBackend(), ReceivingEngine(routes=()), "does not take weights over ipc"),
        ("ipc", HandingBackend(), FarEngine(), "another machine"),
        ("nccl", HandingBackend(), ReceivingEngine(routes=("nccl",)), "computes on a CPU"),
        ("ray", HandingBackend(), ReceivingEngine(routes=("ipc",)), "does not take weights over ray"),
    ],
)
async def test_a_route_that_cannot_be_is_refused_by_name(
    route: str, backend: HandingBackend, engine: ReceivingEngine, why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"sync.route: given '{route}'; .*{why}.*Supported here: .*files"):
        await create_sync(config(route), backend, [engine])


async def test_every_engine_has_to_take_what_is_made() -> None:
    class Picky(ReceivingEngine):
        @property
        def info(self) -> Any:
            import msgspec

            return msgspec.structs.replace(super().info, artifacts=("base", "remote"))

    with pytest.raises(ConfigError, match="no way from backend to engine"):
        await create_sync(config(), AdapterBackend(), [ReceivingEngine(), Picky()])


def test_engines_of_several_gpus_meet_at_ranks_of_their_own() -> None:
    told = meeting([2, 1, 4], "10.0.0.1", 29500)
    assert [place["rank_offset"] for place in told] == [1, 3, 4]
    assert {place["world_size"] for place in told} == {8}
    assert {place["master_address"] for place in told} == {"10.0.0.1"}
