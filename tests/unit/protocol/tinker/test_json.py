"""Tests for the older JSON protocol, and for cases that the SDK does not cover, such as repeated requests."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from instar.protocol.tinker import messages
from tests.unit.protocol.tinker.conftest import BASE_MODEL, KEY, MINT_KEY
from tests.unit.protocol.tinker.raw import RawTinkerClient

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}


@pytest.fixture
def raw(url: str) -> Generator[RawTinkerClient]:
    with RawTinkerClient(url, KEY) as client:
        yield client


@pytest.fixture
def model_id(raw: RawTinkerClient) -> Generator[str]:
    session = raw.create_session()
    yield raw.create_model(session, BASE_MODEL)
    assert raw.post(f"sessions/{session}/finish", {"reason": {"type": "success"}}).status_code == 204


def make_pass_input(loss: str = "cross_entropy") -> dict[str, Any]:
    tensors = {"target_tokens": {"data": [9, 20, 33], "dtype": "int64", "shape": [3]}}
    tensors["weights"] = {"data": [0.0, 1.0, 1.0], "dtype": "float32", "shape": [3]}
    chunk = {"tokens": [5, 9, 20], "type": "encoded_text"}
    return {"data": [{"model_input": {"chunks": [chunk]}, "loss_fn_inputs": tensors}], "loss_fn": loss}


def make_pass_request(model_id: str, seq: int) -> dict[str, Any]:
    return {"forward_backward_input": make_pass_input(), "model_id": model_id, "seq_id": seq}


def test_json_pass_and_step_reduce_the_loss(raw: RawTinkerClient, model_id: str) -> None:
    output = raw.retrieve_result(
        raw.submit("forward", {"forward_input": make_pass_input(), "model_id": model_id, "seq_id": 1})
    )
    [tensors] = output["loss_fn_outputs"]
    assert tensors["logprobs"]["dtype"] == "float32"
    assert tensors["logprobs"]["shape"] == [3]
    first = raw.retrieve_result(raw.submit("forward_backward", make_pass_request(model_id, 2)))
    assert first["metrics"]["loss:sum"] == pytest.approx(-sum(tensors["logprobs"]["data"][1:]), rel=1e-5)
    step_output = raw.retrieve_result(
        raw.submit("optim_step", {"adam_params": ADAM, "model_id": model_id, "seq_id": 3})
    )
    assert step_output["metrics"]["grad_norm"] > 0
    second = raw.retrieve_result(raw.submit("forward_backward", make_pass_request(model_id, 4)))
    assert second["metrics"]["loss:sum"] < first["metrics"]["loss:sum"]


def test_json_requests_run_in_sequence_order(raw: RawTinkerClient, model_id: str) -> None:
    last = raw.submit("forward_backward", make_pass_request(model_id, 3))
    middle = raw.submit("optim_step", {"adam_params": ADAM, "model_id": model_id, "seq_id": 2})
    first = raw.submit("forward_backward", make_pass_request(model_id, 1))
    after, _, before = [raw.retrieve_result(request)["metrics"] for request in (last, middle, first)]
    assert after["loss:sum"] < before["loss:sum"]


def encode_step(model_id: str, seq: int, learning_rate: str) -> bytes:
    """Return a request with ``learning_rate`` inserted as JSON text, which may be invalid."""
    fields = f'"model_id": "{model_id}", "seq_id": {seq}, "adam_params": {{"learning_rate": {learning_rate}}}'
    return b"{%s}" % fields.encode()


@pytest.mark.parametrize("learning_rate", ["NaN", "null", "1e-4]"])
def test_rejected_step_does_not_block_later_steps(
    raw: RawTinkerClient, model_id: str, learning_rate: str
) -> None:
    last = raw.submit("forward_backward", make_pass_request(model_id, 3))
    raw.submit("forward_backward", make_pass_request(model_id, 1))
    rejected = raw.post("optim_step", encode_step(model_id, 2, learning_rate))
    assert rejected.status_code == 400
    assert "cannot be parsed" in rejected.json()["detail"]
    assert raw.retrieve_result(last)["metrics"]["loss:sum"] > 0
    retried = raw.post("optim_step", {"adam_params": ADAM, "model_id": model_id, "seq_id": 2})
    assert retried.status_code == 422
    assert "rejected request" in retried.json()["detail"]


def test_rejected_pass_and_save_do_not_block_later_steps(raw: RawTinkerClient, model_id: str) -> None:
    damaged = messages.ForwardBackwardRequest(model_id=model_id, seq_id=1).SerializeToString() + b"\xff\xff"
    protobuf_header = {"Content-Type": "application/x-protobuf"}
    assert raw.post("forward_backward", damaged, **protobuf_header).status_code == 400
    invalid = {"forward_backward_input": {"data": 1}, "model_id": model_id, "seq_id": 2}
    assert raw.post("forward_backward", invalid).status_code == 400
    assert raw.post("save_weights", {"path": 1, "model_id": model_id, "seq_id": 3}).status_code == 400
    result = raw.retrieve_result(raw.submit("forward_backward", make_pass_request(model_id, 4)))
    assert result["metrics"]["loss:sum"] > 0


def test_optimizer_settings_out_of_range_are_rejected_by_name(raw: RawTinkerClient, model_id: str) -> None:
    raw.submit("forward_backward", make_pass_request(model_id, 1))
    step = {"adam_params": ADAM | {"beta1": 1.0}, "model_id": model_id, "seq_id": 2}
    error = raw.retrieve_result(raw.submit("optim_step", step))["error"]
    assert error == "adam_params.beta1: Input should be less than 1, got 1.0"


def test_repeated_request_runs_once(raw: RawTinkerClient, model_id: str) -> None:
    request = make_pass_request(model_id, 1)
    first = raw.submit("forward_backward", request, **{"X-Idempotency-Key": "a"})
    assert raw.submit("forward_backward", request, **{"X-Idempotency-Key": "a"}) == first
    assert raw.submit("forward_backward", request, **{"X-Idempotency-Key": "b"}) == first
    step = {"adam_params": ADAM, "model_id": model_id, "seq_id": 2}
    norm = raw.retrieve_result(raw.submit("optim_step", step))["metrics"]["grad_norm"]
    assert raw.retrieve_result(raw.submit("optim_step", step))["metrics"]["grad_norm"] == norm
    response = raw.post("optim_step", step | {"seq_id": 1})
    assert response.status_code == 422
    assert "was already used for a different operation" in response.json()["detail"]


def test_repeated_create_model_returns_the_same_model(raw: RawTinkerClient) -> None:
    session = raw.create_session()
    assert raw.create_model(session, BASE_MODEL) == raw.create_model(session, BASE_MODEL)
    assert raw.create_model(session, BASE_MODEL, 1) != raw.create_model(session, BASE_MODEL)
    raw.post(f"sessions/{session}/finish", {})


def test_json_sampling_returns_sequences_and_prompt_logprobs(raw: RawTinkerClient) -> None:
    session = raw.create_session()
    request = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    sampling_session_id = raw.post("create_sampling_session", request).json()["sampling_session_id"]
    assert raw.get(f"samplers/{sampling_session_id}").json()["base_model"] == BASE_MODEL
    sample = {
        "sampling_session_id": sampling_session_id,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [5, 9], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 3, "temperature": 1.0, "top_k": -1, "top_p": 1, "seed": 1},
        "prompt_logprobs": True,
    }
    response = raw.post("asample", sample).json()
    assert len(set(response["sample_sequence_ids"])) == 2
    assert raw.post("asample", sample).json() == response
    result = raw.retrieve_result(response["request_id"])
    assert [len(sequence["tokens"]) for sequence in result["sequences"]] == [3, 3]
    assert result["prompt_logprobs"][0] is None
    assert result["prompt_logprobs"][1] < 0


def test_mint_key_is_exchanged_for_a_token(url: str) -> None:
    with RawTinkerClient(url, KEY) as raw:
        assert not raw.post("client/config", {"sdk_version": "0.36.0"}).json()["pjwt_auth_enabled"]
    with RawTinkerClient(url, MINT_KEY) as raw:
        assert raw.post("client/config", {"sdk_version": "0.22.0"}).json()["pjwt_auth_enabled"]
        session = raw.create_session()
        token = raw.post("auth/token", {}).json()["jwt"]
    with RawTinkerClient(url, token) as raw:
        assert raw.post("session_heartbeat", {"session_id": session}).status_code == 200
        raw.post(f"sessions/{session}/finish", {})
    with RawTinkerClient(url, token[:-2] + ("AA" if token[-2:] != "AA" else "BB")) as raw:
        assert raw.post("client/config", {}).status_code == 401


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("optim_step", b"{", {}, 400),
        ("optim_step", {"seq_id": 1}, {}, 400),
        ("optim_step", {"model_id": "missing", "seq_id": 1}, {}, 404),
        ("forward_backward", b"\xff\xff", {"Content-Type": "application/x-protobuf"}, 400),
        ("telemetry", b"x" * 1_000_001, {}, 413),
        ("telemetry", b"x", {"Content-Encoding": "zstd"}, 415),
        ("mint/checkpoints/interpolate", {}, {}, 404),
    ],
)
def test_invalid_requests_get_user_errors(
    raw: RawTinkerClient, path: str, body: Any, headers: dict[str, str], status: int
) -> None:
    response = raw.post(path, body, **headers)
    assert response.status_code == status
    assert response.json()["category"] == "user"


def test_telemetry_and_health_requests_are_accepted(raw: RawTinkerClient) -> None:
    assert raw.post("telemetry", {"events": []}).json() == {"status": "accepted"}
    assert raw.get("healthz").json() == {"status": "ok"}
