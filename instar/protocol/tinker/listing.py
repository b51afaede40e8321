"""Routes that list the served models, training runs and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from instar.protocol.base import CheckpointInfo, ProtocolError, TrainingService
from instar.protocol.http import json_response
from instar.protocol.tinker.http import TinkerRequest, TinkerRouter
from instar.protocol.tinker.requests import TinkerWeightsInfo
from instar.types import Json

_KINDS = {"state": "training", "sampler": "sampler"}


class TinkerListingRoutes:
    def __init__(self, service: TrainingService) -> None:
        self._service = service

    def register(self, router: TinkerRouter) -> None:
        router.get("get_server_capabilities", self.capabilities)
        router.post("weights_info", self.weights_info)
        router.get("checkpoints", self.checkpoints)
        router.get("training_runs", self.runs)
        router.get("training_runs/{run_id}", self.run)
        router.get("training_runs/{run_id}/checkpoints", self.run_checkpoints)
        router.delete("training_runs/{run_id}/checkpoints/{checkpoint_id:path}", self.delete_checkpoint)

    async def capabilities(self, request: TinkerRequest) -> Response:
        model = {
            "model_name": self._service.base_model,
            "max_context_length": self._service.max_context,
            "trainable": True,
            "sampleable": True,
        }
        return json_response({"supported_models": [model]})

    async def weights_info(self, request: TinkerRequest) -> Response:
        info = self._service.checkpoint(request.parse(TinkerWeightsInfo).tinker_path, request.owner)
        trained = {name: info.extra[name] for name in _TRAINED_PARTS if name in info.extra}
        return json_response(
            {"base_model": info.base_model, "is_lora": True, "lora_rank": info.rank, **trained}
        )

    async def checkpoints(self, request: TinkerRequest) -> Response:
        checkpoints = self._service.checkpoints(request.owner)
        page, cursor = _page(request, [_checkpoint(info) for info in _newest_first(checkpoints)], 100)
        return json_response({"checkpoints": page, "cursor": cursor})

    async def run_checkpoints(self, request: TinkerRequest) -> Response:
        checkpoints = self._service.checkpoints(request.owner, request.path_param("run_id"))
        return json_response({"checkpoints": [_checkpoint(info) for info in _newest_first(checkpoints)]})

    async def runs(self, request: TinkerRequest) -> Response:
        by_model = dict[str, list[CheckpointInfo]]()
        for info in _newest_first(self._service.checkpoints(request.owner)):
            by_model.setdefault(info.model_id, []).append(info)
        page, cursor = _page(request, [_run(name, checkpoints) for name, checkpoints in by_model.items()], 20)
        return json_response({"training_runs": page, "cursor": cursor})

    async def run(self, request: TinkerRequest) -> Response:
        run_id = request.path_param("run_id")
        checkpoints = _newest_first(self._service.checkpoints(request.owner, run_id))
        if checkpoints:
            return json_response(_run(run_id, checkpoints))
        model = self._service.model(run_id, request.owner)
        return json_response(
            _run_fields(run_id, self._service.base_model, model.adapter.rank, datetime.now(UTC))
        )

    async def delete_checkpoint(self, request: TinkerRequest) -> Response:
        checkpoint_id = request.path_param("checkpoint_id")
        if checkpoint_id.endswith("/publish"):
            raise ProtocolError("checkpoints cannot be published on this server")
        self._service.delete_checkpoint(
            f"tinker://{request.path_param('run_id')}/{checkpoint_id}", request.owner
        )
        return Response(status_code=204)


_TRAINED_PARTS = ("train_unembed", "train_mlp", "train_attn")


def _newest_first(checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    return sorted(checkpoints, key=lambda info: info.created_at, reverse=True)


def _page(request: TinkerRequest, items: list[Json], default: int) -> tuple[list[Json], Json]:
    offset, limit = request.query_int("offset", 0), request.query_int("limit", default)
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[offset : offset + limit], cursor


def _checkpoint(info: CheckpointInfo) -> Json:
    return {
        "checkpoint_id": "/".join(info.path.split("/")[-2:]),
        "checkpoint_type": _KINDS[info.kind],
        "time": _to_datetime(info.created_at),
        "tinker_path": info.path,
        "size_bytes": info.size_bytes,
        "expires_at": None if info.expires_at is None else _to_datetime(info.expires_at),
    }


def _run(run_id: str, checkpoints: Sequence[CheckpointInfo]) -> Json:
    """Return the fields of a model's training run. ``checkpoints`` are the model's checkpoints, newest
    first."""
    newest = checkpoints[0]
    fields = _run_fields(run_id, newest.base_model, newest.rank, _to_datetime(newest.created_at))
    for name, kind in (("last_checkpoint", "state"), ("last_sampler_checkpoint", "sampler")):
        fields[name] = next((_checkpoint(info) for info in checkpoints if info.kind == kind), None)
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


def _to_datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
