"""Tests for `instar backends serve --protocol tinker` in its own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker.lib.retryable_exception import RetryableException

from tests.integration.backends.environments import get_interpreter
from tests.sdk_leaks import IGNORE_SDK_LEAKS, collect_sdk_leaks
from tests.tiny import make_tiny_model
from tests.unit.protocol.tinker.raw import RawTinkerClient
from tests.unit.protocol.tinker.test_json import make_pass_request
from tests.unit.protocol.tinker.test_training import make_next_token_datum, run_step

pytestmark = [IGNORE_SDK_LEAKS, pytest.mark.timeout(300)]  # each process imports torch
INSTAR = str(Path(sys.executable).with_name("instar"))
ROOT = Path(__file__).resolve().parents[3]
KEY, MINT_KEY = "tml-0123456789abcdef", "sk-0123456789abcdefgh"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1)


@contextmanager
def run_server(model: Path, folder: Path, port: int = 0) -> Generator[tuple[str, subprocess.Popen[str]]]:
    command = [INSTAR, "backends", "serve", "--protocol", "tinker", "--model", str(model), "--json"]
    process = subprocess.Popen(
        [*command, "--dir", str(folder), "--port", str(port)],
        env=os.environ | {"INSTAR_PROTOCOL_KEYS": f"{KEY},{MINT_KEY}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def parse_port(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_long_poll_is_held_and_does_not_block_shutdown(model: Path, tmp_path: Path) -> None:
    with run_server(model, tmp_path) as (url, process), RawTinkerClient(url, KEY) as raw:
        # Request 2 waits for request 1, which is never sent.
        request_id = raw.submit(
            "forward_backward", make_pass_request(raw.create_model(raw.create_session(), str(model)), 2)
        )
        started_at = time.monotonic()
        response = raw.post("retrieve_future", {"request_id": request_id})
        held_seconds = time.monotonic() - started_at
        assert response.status_code == 408
        assert response.json() == {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        assert 25 < held_seconds < 40
        interrupted_at = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert time.monotonic() - interrupted_at < 15


def test_training_resumes_after_server_is_killed_during_a_step(model: Path, tmp_path: Path) -> None:
    with collect_sdk_leaks(), run_server(model, tmp_path) as (url, process):
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        training = service.create_lora_training_client(str(model), rank=4, seed=3).result()
        run_step(training)
        path = training.save_state("state").result().path
        expected = run_step(training)
        # Send a single request, because the SDK hangs forever if the first of several cannot be sent.
        long_batch = [make_next_token_datum([3 + (i + j) % 300 for j in range(200)]) for i in range(900)]
        pending_pass = training.forward_backward(long_batch, "cross_entropy")
        time.sleep(0.5)
        process.send_signal(signal.SIGKILL)
        with run_server(model, tmp_path, parse_port(url)) as (url, _):
            with pytest.raises((RetryableException, tinker.NotFoundError)):
                pending_pass.result(60)
            with pytest.raises(tinker.NotFoundError):
                training.forward_backward([make_next_token_datum()], "cross_entropy").result(30)
            new_service = tinker.ServiceClient(base_url=url, api_key=KEY)
            resumed = new_service.create_training_client_from_state_with_optimizer(path).result()
            assert run_step(resumed) == pytest.approx(expected, rel=1e-6)
            new_service.close("success").result(10)


def test_mint_sdk_trains_and_samples_on_the_server(model: Path, tmp_path: Path) -> None:
    with run_server(model, tmp_path) as (url, _):
        results = run_mint_program(url, MINT_KEY, str(model))
        results_with_tinker_key = run_mint_program(url, KEY, str(model))
    assert results["model_name"] == str(model)
    assert results["losses"] == sorted(results["losses"], reverse=True)
    assert results["losses"][0] == pytest.approx(-sum(results["forward"]), rel=1e-5)
    assert results["resumed"] == pytest.approx(results["uninterrupted"], rel=1e-6)
    protobuf_results, json_results = results["protobuf_and_json"]
    assert json_results == protobuf_results
    assert results["custom"] == 1.0
    assert results["ppo"] == pytest.approx(-2.5, rel=1e-4)
    assert results["scored"][0] is None
    assert results["scored"][1:] == pytest.approx(results["policy"], abs=1e-4)
    assert all(tokens == logprobs > 0 for tokens, logprobs in results["sampled"])
    assert results["text"] == "hello"
    assert "weights/three" in results["checkpoints"]
    assert "datum 0: unknown loss_fn_inputs mask; cross_entropy supports" in results["error"]
    assert results_with_tinker_key["losses"] == pytest.approx(results["losses"], rel=1e-6)


def run_mint_program(url: str, key: str, base_model: str) -> dict[str, Any]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "MINT_"))}
    program = Path(__file__).with_name("mint_sdk.py")
    completed = subprocess.run(
        [str(get_interpreter("mint")), str(program), base_model],
        env=env | {"MINT_BASE_URL": url, "MINT_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(completed.stdout.splitlines()[-1])
