"""The app that serves Tinker's protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.applications import Starlette
from starlette.responses import Response

from instar.protocol.base import CheckpointInfo, ProtocolError
from instar.protocol.http import json_response
from instar.protocol.operations import OperationScheduler
from instar.protocol.service import TrainingService
from instar.protocol.tinker import requests
from instar.protocol.tinker.http import TinkerKeyStore, TinkerRequest, create_router
from instar.protocol.tinker.results import PROTOBUF, TinkerPassResult, TinkerSampleResult
from instar.protocol.tinker.sampling import TinkerRoutes, TinkerSamplingRoutes, TinkerSamplingSessions
from instar.protocol.tinker.training import TinkerHandler, TinkerTrainingRoutes
from instar.types import Json

_CHECKPOINT_TYPES = {"state": "training", "sampler": "sampler"}
LONG_POLL_TIMEOUT_SECONDS = 30.0
"""How long a request for a result is held open. Clients give up after 45 s."""


def create_app(service: TrainingService, operations: OperationScheduler, keys: Iterable[str]) -> Starlette:
    key_store = TinkerKeyStore(keys)
    dependencies = (service, operations, TinkerSamplingSessions())
    sessions, training = TinkerSessionRoutes(*dependencies), TinkerTrainingRoutes(*dependencies)
    sampling, listing = TinkerSamplingRoutes(*dependencies), TinkerListingRoutes(*dependencies)

    async def issue_token(request: TinkerRequest) -> Response:
        return json_response({"jwt": key_store.issue_token(request.owner)})

    router = create_router(key_store, service.limits.max_body)
    router.add("GET", "healthz", _respond_with({"status": "ok"}))
    router.add("POST", "auth/token", issue_token)
    router.add("POST", "client/config", sessions.get_config)
    router.add("POST", "client/dynamic_config", _respond_with({}))
    router.add("POST", "telemetry", _respond_with({"status": "accepted"}))
    router.add("POST", "create_session", sessions.create_session)
    router.add("POST", "session_heartbeat", sessions.heartbeat)
    router.add("POST", "sessions/{session_id}/finish", sessions.finish_session)
    router.add("POST", "retrieve_future", sessions.retrieve_future)
    router.add("POST", "create_model", training.create_model)
    router.add("POST", "unload_model", training.unload_model)
    router.add("POST", "get_info", training.get_info)
    for path, handler in (
        ("forward_backward", training.forward_backward),
        ("forward", training.forward),
        ("optim_step", training.optim_step),
        ("save_weights", training.save_weights),
        ("save_weights_for_sampler", training.save_for_sampler),
        ("load_weights", training.load_weights),
    ):
        router.add("POST", path, training.consume_rejected_seq_ids(handler))
    router.add("POST", "create_sampling_session", sampling.create)
    router.add("POST", "asample", sampling.sample)
    router.add("GET", "samplers/{sampler_id}", sampling.get_info)
    router.add("GET", "get_server_capabilities", listing.get_capabilities)
    router.add("POST", "weights_info", listing.get_weights_info)
    router.add("GET", "checkpoints", listing.list_checkpoints)
    router.add("GET", "training_runs", listing.list_runs)
    router.add("GET", "training_runs/{run_id}", listing.get_run)
    router.add("GET", "training_runs/{run_id}/checkpoints", listing.list_run_checkpoints)
    checkpoint_path = "training_runs/{run_id}/checkpoints/{checkpoint_id:path}"
    router.add("DELETE", checkpoint_path, listing.delete_checkpoint)
    return router.create_app()


class TinkerSessionRoutes(TinkerRoutes):
    """The routes for sessions, operation results, client settings and telemetry."""

    async def get_config(self, request: TinkerRequest) -> Response:
        # Older clients send JSON unless ``proto_write_fwdbwd`` is set.
        settings = {"pjwt_auth_enabled": not request.has_tinker_key, "proto_write_fwdbwd": True}
        response = json_response(settings)
        # Clients open a separate connection for this request and never close it themselves.
        response.headers["connection"] = "close"
        return response

    async def create_session(self, request: TinkerRequest) -> Response:
        session_id = await self._service.create_session(request.owner)
        return json_response({"type": "create_session", "session_id": session_id})

    async def heartbeat(self, request: TinkerRequest) -> Response:
        with _convert_404_to_410():  # clients stop sending heartbeats only on 410
            self._service.heartbeat(request.parse(requests.HeartbeatRequest).session_id, request.owner)
        return json_response({"type": "session_heartbeat"})

    async def finish_session(self, request: TinkerRequest) -> Response:
        session_id = request.path_param("session_id")
        await self._service.end_session(session_id, request.owner)
        model_ids, paths = self._sessions.end(session_id)
        for model_id in model_ids:
            self._operations.close_queue(model_id)
        for path in paths:
            with contextlib.suppress(ProtocolError):  # the checkpoint may have expired
                self._service.checkpoints.delete(path, request.owner)
        return Response(status_code=204)

    async def retrieve_future(self, request: TinkerRequest) -> Response:
        request_id = request.parse(requests.FutureRequest).request_id
        # An unknown operation was started before the server was restarted, or its result has expired. On 410,
        # clients resubmit sampling requests and report training requests as lost.
        with _convert_404_to_410():
            result = await self._operations.wait(request_id, request.owner, LONG_POLL_TIMEOUT_SECONDS)
        if result is None:
            fields = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return json_response(fields, 408)
        if result.error is not None:
            return json_response({"error": str(result.error), "category": result.error.category})
        value = result.value
        if not isinstance(value, (TinkerPassResult, TinkerSampleResult)):
            return json_response(value)
        if PROTOBUF in request.http.headers.get("accept", ""):
            return Response(value.to_protobuf(), media_type=PROTOBUF)
        return json_response(value.to_json())


def _respond_with(fields: Json) -> TinkerHandler:
    async def handle(request: TinkerRequest) -> Response:
        return json_response(fields)

    return handle


@contextlib.contextmanager
def _convert_404_to_410() -> Generator[None]:
    try:
        yield
    except ProtocolError as error:
        raise ProtocolError(str(error), 410 if error.status == 404 else error.status) from error


class TinkerListingRoutes(TinkerRoutes):
    """The routes for the served models, training runs and checkpoints."""

    async def get_capabilities(self, request: TinkerRequest) -> Response:
        model = {
            "model_name": self._service.base_model,
            "max_context_length": self._service.max_context,
            "trainable": True,
            "sampleable": True,
        }
        return json_response({"supported_models": [model]})

    async def get_weights_info(self, request: TinkerRequest) -> Response:
        path = request.parse(requests.WeightsInfoRequest).tinker_path
        info = self._service.checkpoints.find(path, request.owner)
        fields = {"base_model": info.base_model, "is_lora": True, "lora_rank": info.rank}
        return json_response(fields | info.extra)

    def _list_newest_first(self, owner: str, model_id: str | None = None) -> list[CheckpointInfo]:
        return self._service.checkpoints.list_checkpoints(owner, model_id)[::-1]

    async def list_checkpoints(self, request: TinkerRequest) -> Response:
        checkpoints = [_checkpoint_fields(info) for info in self._list_newest_first(request.owner)]
        return _make_page_response(request, "checkpoints", checkpoints, 100)

    async def list_run_checkpoints(self, request: TinkerRequest) -> Response:
        checkpoints = self._list_newest_first(request.owner, request.path_param("run_id"))
        return json_response({"checkpoints": [_checkpoint_fields(info) for info in checkpoints]})

    async def list_runs(self, request: TinkerRequest) -> Response:
        by_model = dict[str, list[CheckpointInfo]]()
        for info in self._list_newest_first(request.owner):
            by_model.setdefault(info.model_id, []).append(info)
        runs = [_run_fields(model_id, checkpoints) for model_id, checkpoints in by_model.items()]
        return _make_page_response(request, "training_runs", runs, 20)

    async def get_run(self, request: TinkerRequest) -> Response:
        run_id = request.path_param("run_id")
        checkpoints = self._list_newest_first(request.owner, run_id)
        if checkpoints:
            return json_response(_run_fields(run_id, checkpoints))
        rank = self._service.find_model(run_id, request.owner).adapter.rank
        return json_response(_base_run_fields(run_id, self._service.base_model, rank, datetime.now(UTC)))

    async def delete_checkpoint(self, request: TinkerRequest) -> Response:
        checkpoint_id = request.path_param("checkpoint_id")
        if checkpoint_id.endswith("/publish"):
            raise ProtocolError("this server does not support publishing or unpublishing checkpoints")
        path = f"tinker://{request.path_param('run_id')}/{checkpoint_id}"
        self._service.checkpoints.delete(path, request.owner)
        return Response(status_code=204)


def _make_page_response(request: TinkerRequest, name: str, items: list[Json], default_limit: int) -> Response:
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
    """Build the fields of a training run from its checkpoints, which are sorted newest first."""
    newest = checkpoints[0]
    fields = _base_run_fields(run_id, newest.base_model, newest.rank, _to_datetime(newest.created_at))
    for name, kind in (("last_checkpoint", "state"), ("last_sampler_checkpoint", "sampler")):
        fields[name] = next((_checkpoint_fields(info) for info in checkpoints if info.kind == kind), None)
    return fields


def _base_run_fields(run_id: str, base_model: str, rank: int, last_request_time: datetime) -> dict[str, Any]:
    return {
        "training_run_id": run_id,
        "base_model": base_model,
        "model_owner": "",
        "is_lora": True,
        "lora_rank": rank,
        "last_request_time": last_request_time,
    }


def _to_datetime(timestamp: float) -> datetime:
    return datetime.fromtimestamp(timestamp, UTC)
