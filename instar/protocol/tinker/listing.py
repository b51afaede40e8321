"""Routes that list the served models, training runs and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from instar.protocol.base import CheckpointInfo, ProtocolError
from instar.protocol.http import json_response
from instar.protocol.service import TrainingService
from instar.protocol.tinker.http import TinkerRequest, TinkerRouter
from instar.protocol.tinker.requests import TinkerWeightsInfo
from instar.types import Json

_CHECKPOINT_TYPES = {"state": "training", "sampler": "sampler"}
_TRAINED_PARTS = ("train_unembed", "train_mlp", "train_attn")


class TinkerListingRoutes:
    def __init__(self, service: TrainingService) -> None:
        self._service = service

    def register(self, router: TinkerRouter) -> None:
        router.add("GET", "get_server_capabilities", self.capabilities)
        router.add("POST", "weights_info", self.weights_info)
        router.add("GET", "checkpoints", self.checkpoints)
        router.add("GET", "training_runs", self.runs)
        router.add("GET", "training_runs/{run_id}", self.run)
        router.add("GET", "training_runs/{run_id}/checkpoints", self.run_checkpoints)
        router.add(
            "DELETE", "training_runs/{run_id}/checkpoints/{checkpoint_id:path}", self.delete_checkpoint
        )

    async def capabilities(self, request: TinkerRequest) -> Response:
        model = {
            "model_name": self._service.base_model,
            "max_context_length": self._service.max_context,
            "trainable": True,
            "sampleable": True,
        }
        return json_response({"supported_models": [model]})

    async def weights_info(self, request: TinkerRequest) -> Response:
        info = self._service.checkpoints.find(request.parse(TinkerWeightsInfo).tinker_path, request.owner)
        trained = {name: info.extra[name] for name in _TRAINED_PARTS if name in info.extra}
        return json_response(
            {"base_model": info.base_model, "is_lora": True, "lora_rank": info.rank, **trained}
        )

    def _newest_first(self, owner: str, model_id: str | None = None) -> list[CheckpointInfo]:
        checkpoints = self._service.checkpoints.list_checkpoints(owner, model_id)
        return sorted(checkpoints, key=lambda info: info.created_at, reverse=True)

    async def checkpoints(self, request: TinkerRequest) -> Response:
        checkpoints = [_checkpoint_fields(info) for info in self._newest_first(request.owner)]
        return _page_response(request, "checkpoints", checkpoints, 100)

    async def run_checkpoints(self, request: TinkerRequest) -> Response:
        checkpoints = self._newest_first(request.owner, request.path_param("run_id"))
        return json_response({"checkpoints": [_checkpoint_fields(info) for info in checkpoints]})

    async def runs(self, request: TinkerRequest) -> Response:
        by_model = dict[str, list[CheckpointInfo]]()
        for info in self._newest_first(request.owner):
            by_model.setdefault(info.model_id, []).append(info)
        runs = [_run_fields(model_id, checkpoints) for model_id, checkpoints in by_model.items()]
        return _page_response(request, "training_runs", runs, 20)

    async def run(self, request: TinkerRequest) -> Response:
        run_id = request.path_param("run_id")
        checkpoints = self._newest_first(request.owner, run_id)
        if checkpoints:
            return json_response(_run_fields(run_id, checkpoints))
        rank = self._service.find_model(run_id, request.owner).adapter.rank
        return json_response(_base_run_fields(run_id, self._service.base_model, rank, datetime.now(UTC)))

    async def delete_checkpoint(self, request: TinkerRequest) -> Response:
        checkpoint_id = request.path_param("checkpoint_id")
        if checkpoint_id.endswith("/publish"):
            raise ProtocolError("checkpoints cannot be published on this server")
        path = f"tinker://{request.path_param('run_id')}/{checkpoint_id}"
        self._service.checkpoints.delete(path, request.owner)
        return Response(status_code=204)


def _page_response(request: TinkerRequest, name: str, items: list[Json], default_limit: int) -> Response:
    offset, limit = request.query_int("offset", 0), request.query_int("limit", default_limit)
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return json_response({name: items[offset : offset + limit], "cursor": cursor})


def _checkpoint_fields(info: CheckpointInfo) -> Json:
    return {
        "checkpoint_id": "/".join(info.path.split("/")[-2:]),
        "checkpoint_type": _CHECKPOINT_TYPES[info.kind],
        "time": _to_datetime(info.created_at),
        "tinker_path": info.path,
        "size_bytes": info.size_bytes,
        "expires_at": None if info.expires_at is None else _to_datetime(info.expires_at),
    }


def _run_fields(run_id: str, checkpoints: Sequence[CheckpointInfo]) -> Json:
    """Return the fields of a training run from its checkpoints, which are ordered from new to old."""
    newest = checkpoints[0]
    fields = _base_run_fields(run_id, newest.base_model, newest.rank, _to_datetime(newest.created_at))
    for name, kind in (("last_checkpoint", "state"), ("last_sampler_checkpoint", "sampler")):
        fields[name] = next((_checkpoint_fields(info) for info in checkpoints if info.kind == kind), None)
    return fields


def _base_run_fields(run_id: str, base_model: str, rank: int, last_request: datetime) -> dict[str, Any]:
    return {
        "training_run_id": run_id,
        "base_model": base_model,
        "model_owner": "",
        "is_lora": True,
        "lora_rank": rank,
        "last_request_time": last_request,
    }


def _to_datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
