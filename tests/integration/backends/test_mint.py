"""MinT's adapters, in MinT's own environment, against SkyRL's server: the protocol on another framework."""

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
from instar.config import LocalBackendConfig, LoraConfig, LossConfig, ModelConfig
from instar.types import Floats
from tests.integration.backends.environments import interpreter
from tests.integration.backends.mint_program import ADAM, STEPS, batch
from tests.tiny import make_tiny_model

HERE = Path(__file__).parent
PROGRAM_SECONDS = 800
SERVER_SECONDS = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    return ModelConfig(name=str(folder), dtype="fp32", device="cpu", max_context=256)


def run_program(url: str, key: str, model: ModelConfig, scratch: Path) -> dict[str, Any]:
    command = [str(interpreter("mint")), str(HERE / "mint_program.py"), url, model.name, str(scratch)]
    env = {**os.environ, "MINT_API_KEY": key, "TINKER_BASE_URL": "http://stays-as-it-was"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_SECONDS, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert key not in done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def floats(listed: list[list[float | None]]) -> list[Floats]:
    return [np.asarray([np.nan if x is None else x for x in one], np.float32) for one in listed]


def check_what_any_service_gives(reported: dict[str, Any]) -> None:
    assert reported["environment_kept"]
    losses = [*reported["losses"], reported["cross_entropy"], *reported["straight"]]
    assert all(map(np.isfinite, losses))
    assert reported["losses"][-1] < reported["losses"][0] - 0.01
    np.testing.assert_allclose(reported["resumed"], reported["straight"], rtol=1e-4)
    sampled = reported["sampled"]
    assert len(sampled["ids"]) == 8
    assert set(reported["base_versions"]) == {0}
    assert set(sampled["versions"]) == {1}
    np.testing.assert_allclose(sampled["logprobs"], sampled["trained"], atol=1e-3)
    np.testing.assert_allclose(sampled["scored"], sampled["trained"], atol=1e-3)


async def local(model: ModelConfig) -> tuple[list[Floats], list[float]]:
    """The same in process: logprobs before, and the losses of the first steps."""
    backend = LocalBackend(model, LocalBackendConfig(threads=1, lora=LoraConfig(rank=8)), seed=5)
    logprobs, losses = await backend.forward(batch()), []
    for _ in range(STEPS):
        losses.append((await backend.forward_backward(batch(), LossConfig())).loss)
        await backend.optim_step(ADAM)
    await backend.close()
    return logprobs, losses


@contextlib.contextmanager
def skyrl(model: ModelConfig, folder: Path) -> Generator[str]:
    """Its address, while it is up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(interpreter("skyrl")),
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
        _wait(f"http://127.0.0.1:{port}/api/v1/healthz", server, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        # The engine that it started is of its session too.
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < until and server.poll() is None:
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(url, timeout=5),
        ):
            return
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])


@pytest.mark.timeout(1200)
async def test_mint_trains_against_skyrl(model: ModelConfig, tmp_path: Path) -> None:
    """It draws its adapters and scales its gradients otherwise. What does not hang on them is the same: the
    base model's logprobs, and with them the first loss."""
    (tmp_path / "skyrl").mkdir()
    with skyrl(model, tmp_path / "skyrl") as url:
        reported = run_program(url, "tml-any", model, tmp_path)
    check_what_any_service_gives(reported)
    logprobs, losses = await local(model)
    assert reported["losses"][0] == pytest.approx(losses[0], rel=1e-3)
    for name in ("forward", "reference"):
        for actual, expected in zip(floats(reported[name]), logprobs, strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-3)
