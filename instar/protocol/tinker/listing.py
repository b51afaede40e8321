"""What there is: the models that are served, training runs, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from instar.protocol.base import CheckpointInfo, ProtocolError, Workshop
from instar.protocol.tinker.http import Call, Routes, answer
from instar.protocol.tinker.requests import WeightsInfo
from instar.types import Json

_KINDS = {"state": "training", "sampler": "sampler"}


class Listing:
    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop

    def add_to(self, routes: Routes) -> None:
        routes.get("get_server_capabilities", self.capabilities)
        routes.post("weights_info", self.weights_info)
        routes.get("checkpoints", self.checkpoints)
        routes.get("training_runs", self.runs)
        routes.get("training_runs/{run_id}", self.run)
        routes.get("training_runs/{run_id}/checkpoints", self.run_checkpoints)
        routes.delete("training_runs/{run_id}/checkpoints/{checkpoint_id:path}", self.delete_checkpoint)

    async def capabilities(self, call: Call) -> Response:
        model = {
            "model_name": self._workshop.base_model,
            "max_context_length": self._workshop.max_context,
            "trainable": True,
            "sampleable": True,
        }
        return answer({"supported_models": [model]})

    async def weights_info(self, call: Call) -> Response:
        info = self._workshop.checkpoint(call.read(WeightsInfo).tinker_path, call.owner)
        trained = {name: info.extra[name] for name in _TRAINED if name in info.extra}
        return answer({"base_model": info.base_model, "is_lora": True, "lora_rank": info.rank, **trained})

    async def checkpoints(self, call: Call) -> Response:
        found = self._workshop.checkpoints(call.owner)
        page, cursor = _page(call, [_checkpoint(info) for info in _newest_first(found)], 100)
        return answer({"checkpoints": page, "cursor": cursor})

    async def run_checkpoints(self, call: Call) -> Response:
        found = self._workshop.checkpoints(call.owner, call.part("run_id"))
        return answer({"checkpoints": [_checkpoint(info) for info in _newest_first(found)]})

    async def runs(self, call: Call) -> Response:
        by_model = dict[str, list[CheckpointInfo]]()
        for info in _newest_first(self._workshop.checkpoints(call.owner)):
            by_model.setdefault(info.model_id, []).append(info)
        page, cursor = _page(call, [_run(name, found) for name, found in by_model.items()], 20)
        return answer({"training_runs": page, "cursor": cursor})

    async def run(self, call: Call) -> Response:
        run_id = call.part("run_id")
        found = _newest_first(self._workshop.checkpoints(call.owner, run_id))
        if found:
            return answer(_run(run_id, found))
        model = self._workshop.model(run_id, call.owner)
        return answer(_run_fields(run_id, self._workshop.base_model, model.adapter.rank, datetime.now(UTC)))

    async def delete_checkpoint(self, call: Call) -> Response:
        checkpoint_id = call.part("checkpoint_id")
        if checkpoint_id.endswith("/publish"):
            raise ProtocolError("checkpoints cannot be published here")
        self._workshop.delete_checkpoint(f"tinker://{call.part('run_id')}/{checkpoint_id}", call.owner)
        return Response(status_code=204)


_TRAINED = ("train_unembed", "train_mlp", "train_attn")


def _newest_first(found: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    return sorted(found, key=lambda info: info.created_at, reverse=True)


def _page(call: Call, items: list[Json], default: int) -> tuple[list[Json], Json]:
    offset, limit = call.number("offset", 0), call.number("limit", default)
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[offset : offset + limit], cursor


def _checkpoint(info: CheckpointInfo) -> Json:
    return {
        "checkpoint_id": "/".join(info.path.split("/")[-2:]),
        "checkpoint_type": _KINDS[info.kind],
        "time": _moment(info.created_at),
        "tinker_path": info.path,
        "size_bytes": info.size_bytes,
        "expires_at": None if info.expires_at is None else _moment(info.expires_at),
    }


def _run(run_id: str, found: Sequence[CheckpointInfo]) -> Json:
    """Of a model with checkpoints, newest first."""
    newest = found[0]
    fields = _run_fields(run_id, newest.base_model, newest.rank, _moment(newest.created_at))
    for name, kind in (("last_checkpoint", "state"), ("last_sampler_checkpoint", "sampler")):
        fields[name] = next((_checkpoint(info) for info in found if info.kind == kind), None)
    return fields


def _run_fields(run_id: str, base_model: str, rank: int, last_request: datetime) -> dict[str, Any]:
    return {
        "training_run_id": run_id,
        "base_model": base_model,
        "model_owner": "",
        "is_lora": True,
        "lora_rank": rank,
        "last_request_time": last_request,
    }


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
