"""Tests for MinT's backend and sampler in MinT's own environment, with SkyRL's Tinker server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.backends.local.backend import LocalBackend
from instar.config import LocalBackendConfig, LoraConfig, ModelConfig
from instar.conformance.cases import LOSS
from instar.types import Floats
from tests.integration.backends.environments import get_interpreter
from tests.integration.backends.mint_program import ADAM, STEPS, make_batch
from tests.tiny import make_tiny_model

HERE = Path(__file__).parent
PROGRAM_TIMEOUT_SECONDS = 800
SERVER_START_TIMEOUT_SECONDS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    return ModelConfig(name=str(folder), dtype="fp32", device="cpu", max_context=256)


def run_program(url: str, key: str, model: ModelConfig, scratch: Path) -> dict[str, Any]:
    command = [str(get_interpreter("mint")), str(HERE / "mint_program.py"), url, model.name, str(scratch)]
    env = {**os.environ, "MINT_API_KEY": key, "TINKER_BASE_URL": "http://unchanged.invalid"}
    completed = subprocess.run(
        command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_SECONDS, env=env
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert key not in completed.stdout + completed.stderr
    return json.loads(completed.stdout.splitlines()[-1])


def parse_floats(arrays: list[list[float | None]]) -> list[Floats]:
    return [np.asarray([np.nan if x is None else x for x in array], np.float32) for array in arrays]


def check_results(results: dict[str, Any]) -> None:
    assert results["is_environment_unchanged"]
    losses = [*results["losses"], results["cross_entropy"], *results["uninterrupted"]]
    assert all(map(np.isfinite, losses))
    assert results["losses"][-1] < results["losses"][0] - 0.01
    np.testing.assert_allclose(results["resumed"], results["uninterrupted"], rtol=1e-4)
    sampled = results["sampled"]
    assert len(sampled["ids"]) == 8
    assert set(results["base_versions"]) == {0}
    assert set(sampled["versions"]) == {1}
    np.testing.assert_allclose(sampled["logprobs"], sampled["backend_logprobs"], atol=1e-3)
    np.testing.assert_allclose(sampled["scored_logprobs"], sampled["backend_logprobs"], atol=1e-3)


async def run_local_backend(model: ModelConfig) -> tuple[list[Floats], list[float]]:
    """Train with the local backend, and return the initial logprobs and the losses of the first steps."""
    backend = LocalBackend(model, LocalBackendConfig(threads=1, lora=LoraConfig(rank=8)), seed=5)
    logprobs, losses = await backend.forward(make_batch()), []
    for _ in range(STEPS):
        losses.append((await backend.forward_backward(make_batch(), LOSS)).loss)
        await backend.optim_step(ADAM)
    await backend.close()
    return logprobs, losses


@contextlib.contextmanager
def run_skyrl_server(model: ModelConfig, folder: Path) -> Generator[str]:
    """Yield the URL of a running SkyRL server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(get_interpreter("skyrl")),
        str(HERE / "skyrl_server.py"),
        "api",
        str(port),
        model.name,
        str(folder),
    ]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,
        )
    try:
        _wait_until_healthy(f"http://127.0.0.1:{port}/api/v1/healthz", server, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        # The process group includes the engine that the server started.
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline = time.monotonic() + SERVER_START_TIMEOUT_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(url, timeout=5),
        ):
            return
        time.sleep(0.2)
    raise AssertionError(log_path.read_text()[-3000:])


@pytest.mark.timeout(1200)
async def test_mint_trains_and_samples_with_a_skyrl_server(model: ModelConfig, tmp_path: Path) -> None:
    """SkyRL initializes adapters and scales gradients differently, so only the base model's logprobs and the
    first loss are compared with the local backend."""
    (tmp_path / "skyrl").mkdir()
    with run_skyrl_server(model, tmp_path / "skyrl") as url:
        results = run_program(url, "tml-test-key", model, tmp_path)
    check_results(results)
    logprobs, losses = await run_local_backend(model)
    assert results["losses"][0] == pytest.approx(losses[0], rel=1e-3)
    for name in ("forward", "reference"):
        for actual, expected in zip(parse_floats(results[name]), logprobs, strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-3)
