"""Tests for keys, sessions, checkpoint listings, and requests for objects that the server no longer has."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tinker
from tinker import types
from tinker.lib.retryable_exception import RetryableException

from instar.config import ModelConfig
from instar.protocol.base import ServiceLimits
from tests.sdk_leaks import IGNORE_SDK_LEAKS
from tests.unit.protocol.serving import serve_in_thread
from tests.unit.protocol.tinker.conftest import BASE_MODEL, KEY, OTHER_KEY
from tests.unit.protocol.tinker.raw import RawTinkerClient
from tests.unit.protocol.tinker.test_training import ADAM, make_next_token_datum, run_step

pytestmark = IGNORE_SDK_LEAKS


def test_request_without_valid_key_is_rejected(url: str) -> None:
    with pytest.raises(tinker.AuthenticationError, match="is not valid for this server") as caught:
        tinker.RestClient(base_url=url, api_key="tml-guessed").get_server_capabilities().result()
    assert "guessed" not in str(caught.value)
    with RawTinkerClient(url, "") as raw:
        assert raw.post("client/config", {}).status_code == 401
    with RawTinkerClient(url, "eyJ.e30.x") as raw:
        assert raw.post("client/config", {}).status_code == 401


def test_objects_of_one_key_are_hidden_from_others(url: str, training_client: tinker.TrainingClient) -> None:
    path = training_client.save_state("mine").result().path
    with RawTinkerClient(url, OTHER_KEY) as raw:
        assert raw.post("get_info", {"model_id": training_client.model_id}).status_code == 404
        assert raw.post("weights_info", {"tinker_path": path}).status_code == 404
        assert raw.get("checkpoints").json()["checkpoints"] == []


def test_checkpoints_are_listed_and_deleted(url: str, training_client: tinker.TrainingClient) -> None:
    state = training_client.save_state("s", ttl_seconds=7200).result().path
    sampler = training_client.save_weights_for_sampler("p").result().path
    rest = tinker.RestClient(base_url=url, api_key=KEY)
    run_id = training_client.model_id
    checkpoints = {c.tinker_path: c for c in rest.list_checkpoints(run_id).result().checkpoints}
    assert checkpoints.keys() == {state, sampler}
    assert (checkpoints[state].checkpoint_type, checkpoints[sampler].checkpoint_type) == (
        "training",
        "sampler",
    )
    assert checkpoints[state].expires_at is not None
    assert checkpoints[sampler].expires_at is None
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
    training_run = rest.get_training_run(run_id).result()
    assert training_run.last_checkpoint is not None
    assert training_run.last_checkpoint.tinker_path == state
    assert run_id in {r.training_run_id for r in rest.list_training_runs().result().training_runs}
    page = rest.list_user_checkpoints(limit=1).result()
    assert len(page.checkpoints) == 1
    assert page.cursor is not None
    assert page.cursor.total_count >= 2
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    rest.delete_checkpoint(run_id, checkpoints[state].checkpoint_id).result()
    assert rest.list_checkpoints(run_id).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(state).result()
    with pytest.raises(tinker.APIStatusError, match="does not support POST"):
        rest.publish_checkpoint_from_tinker_path(state).result()


def test_finished_session_removes_models_and_ephemeral_weights(url: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    training_client = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    kept = training_client.save_weights_for_sampler("kept").result().path
    training_client.save_weights_and_get_sampling_client().result()
    session = service.holder.get_session_id()
    with RawTinkerClient(url, KEY) as raw:
        assert raw.post("session_heartbeat", {"session_id": session}).status_code == 200
        service.close("success").result(10)
        assert raw.post("session_heartbeat", {"session_id": session}).status_code == 410
        assert raw.post("get_info", {"model_id": training_client.model_id}).status_code == 404
        checkpoints = raw.get(f"training_runs/{training_client.model_id}/checkpoints").json()["checkpoints"]
        assert [checkpoint["tinker_path"] for checkpoint in checkpoints] == [kept]


def test_restarted_server_reports_lost_objects_immediately(tiny_model: ModelConfig, tmp_path: Path) -> None:
    options = {"folder": tmp_path, "keys": [KEY], "base_model": BASE_MODEL}
    with serve_in_thread("tinker", tiny_model, **options) as url:
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        training_client = service.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result()
        run_step(training_client)
        path = training_client.save_state("kept").result().path
        loss = run_step(training_client)
        sampling_client = training_client.save_weights_and_get_sampling_client().result()
    port = int(url.rpartition(":")[2])
    with serve_in_thread("tinker", tiny_model, port=port, **options) as url:
        start = time.monotonic()
        with pytest.raises(tinker.NotFoundError, match="does not exist or was closed"):
            training_client.forward_backward([make_next_token_datum()], "cross_entropy").result(20)
        with pytest.raises(tinker.NotFoundError, match=r"sampling session .* does not exist or has ended"):
            sampling_client.sample(
                types.ModelInput.from_ints([5]), 1, types.SamplingParams(max_tokens=1)
            ).result(20)
        with pytest.raises(tinker.NotFoundError, match=r"session .* does not exist or has ended"):
            service.create_lora_training_client(BASE_MODEL, rank=4).result()
        assert time.monotonic() - start < 10
        with RawTinkerClient(url, KEY) as raw:
            assert raw.post("retrieve_future", {"request_id": "op-expired"}).status_code == 410
        new_service = tinker.ServiceClient(base_url=url, api_key=KEY)
        resumed = new_service.create_training_client_from_state_with_optimizer(path).result()
        assert run_step(resumed) == pytest.approx(loss, rel=1e-6)
        new_service.close("success").result(10)
        service.close("errored")


def test_lost_result_is_reported_as_retryable(url: str, training_client: tinker.TrainingClient) -> None:
    """The SDK raises this error from training calls and retries sampling calls."""
    from tinker.lib.api_future_impl import _APIFuture

    lost_future: _APIFuture[types.OptimStepResponse] = _APIFuture(
        types.OptimStepResponse,
        training_client.holder,
        types.UntypedAPIFuture(request_id="op-unknown"),
        request_start_time=time.time(),
        request_type="OptimStep",
    )
    with pytest.raises(RetryableException, match="expired/broken"):
        lost_future.result(10)
    training_client.forward_backward([make_next_token_datum()], "cross_entropy")
    training_client.optim_step(ADAM).result()


def test_load_that_cannot_succeed_ends_no_idle_session(tiny_model: ModelConfig, tmp_path: Path) -> None:
    limits = ServiceLimits(max_models=1, eviction_idle_seconds=0)
    options = {"folder": tmp_path, "keys": [KEY], "base_model": BASE_MODEL, "limits": limits}
    with serve_in_thread("tinker", tiny_model, **options) as url, RawTinkerClient(url, KEY) as raw:
        model_id = raw.create_model(raw.create_session(), BASE_MODEL)
        save = raw.submit("save_weights_for_sampler", {"model_id": model_id, "seq_id": 1, "path": "sampler"})
        path = raw.retrieve_result(save)["path"]
        ids = {"session_id": raw.create_session(), "model_seq_id": 0}
        load = raw.submit("load_weights", {**ids, "path": path, "optimizer": False})
        assert "was saved for sampling only" in raw.retrieve_result(load)["error"]
        assert raw.post("get_info", {"model_id": model_id}).status_code == 200
