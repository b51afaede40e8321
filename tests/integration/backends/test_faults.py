"""Tests that cloud backends survive connection faults and expired sessions.

A transient fault must cause no error. Any other fault may cause an error, but within the call's timeout. The
results must equal those of a run without faults, so no step may be lost or trained twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.clouds.base import SERVICES
from instar.conformance.server import PROTOCOLS
from tests.integration.backends.environments import get_interpreter
from tests.integration.backends.faulty_proxy import FAULTS, TRANSIENT_FAULTS
from tests.tiny import make_tiny_model
from tests.torture.certificates import make_single_certificate_env
from tests.torture.fork_server import ROOT, ForkServer
from tests.torture.service_run import ServiceProcess

pytestmark = pytest.mark.alone
PROGRAM_TIMEOUT_SECONDS = 400
SLACK_SECONDS = 4.0
"""The time by which a call may exceed its timeout on a busy machine."""
MAX_STALL_SECONDS = 1.0
SESSION_TTL_SECONDS = 2.5
SELECTIONS = {"tinker": "even", "mint": "odd", "weaver": "faults"}
"""The faults for each service. Tinker and MinT share a backend, so each gets half of the faults."""
ENDPOINTS = {
    "tinker": ("forward_backward", "optim_step", "save_weights", "load_weights", "asample", "create_model"),
    "mint": ("forward", "forward_backward", "optim_step", "save_weights", "load_weights", "asample"),
    "weaver": ("forward-passes", "forward-backward-passes", "optimizer-steps", "export-sampler", "load"),
}
"""Endpoints that must be among those with faults."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=256)


@pytest.fixture(scope="module")
def fork_server() -> Generator[ForkServer]:
    fork_server = ForkServer("tests.torture.service_server", "peft")
    yield fork_server
    fork_server.close()


def run_program(
    service: str,
    selection: str,
    model: Path,
    fork_server: ForkServer,
    folder: Path,
    session_ttl_seconds: float,
) -> dict[str, Any]:
    """Run the program against a server with the service's protocol, and return its output.

    Checks that the program does not print the key or block its event loop.
    """
    server = ServiceProcess(PROTOCOLS[service], model, folder, fork_server, session_ttl_seconds)
    server.start()
    server.wait_until_listening()
    python = str(get_interpreter("mint")) if service == "mint" else sys.executable
    command = [python, "-m", "tests.integration.backends.faults_program", service, server.url]
    env = {
        **os.environ,
        **make_single_certificate_env(),
        SERVICES[service].key_env: server.key,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    try:
        completed = subprocess.run(
            [*command, str(model), str(folder / "work"), selection],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=PROGRAM_TIMEOUT_SECONDS,
        )
    finally:
        fork_server.kill()
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert server.key not in completed.stdout + completed.stderr + server.output.read_text()
    output: dict[str, Any] = json.loads(completed.stdout)
    assert output["longest_stall_seconds"] < MAX_STALL_SECONDS
    return output


def check_case(case: dict[str, Any], baseline: dict[str, Any]) -> None:
    for error in case["errors"]:
        assert error["is_expected"], f"unexpected error: {error}"
        assert len(error["text"]) > 10
        assert not error["contains_key"]
        assert error["seconds"] < case["timeout_seconds"] + SLACK_SECONDS, error
    assert case["close_seconds"] < SLACK_SECONDS
    results = case["results"]
    for name in ("before", "after", "sampled", "versions"):
        assert results[name] == baseline[name], name
    for name in ("scored", "reference"):  # the last digit depends on the other sequences in a batch
        np.testing.assert_allclose(np.ravel(results[name]), np.ravel(baseline[name]), atol=1e-5)


@pytest.mark.timeout(PROGRAM_TIMEOUT_SECONDS + 60)
@pytest.mark.parametrize("service", ["tinker", "weaver", "mint"])
def test_backend_survives_connection_faults(
    service: str, model: Path, fork_server: ForkServer, tmp_path: Path
) -> None:
    output = run_program(service, SELECTIONS[service], model, fork_server, tmp_path, 600.0)
    for name in ENDPOINTS[service]:
        assert any(
            endpoint.endswith(f"/{name}") or endpoint == f"POST {name}" for endpoint in output["endpoints"]
        ), name
    for case in output["cases"]:
        description = f"{case['fault']} at {case['endpoint']}: {case['errors']}"
        # On a busy machine a short timeout may expire before the fault occurs.
        assert case["fault_count"] or case["errors"], description
        try:
            check_case(case, output["baseline"])
        except AssertionError as error:
            raise AssertionError(description) from error
        if case["fault"] in TRANSIENT_FAULTS and not case["is_permanent"]:
            assert not case["errors"], description
    assert {case["fault"] for case in output["cases"]} == {fault.name for fault in FAULTS}
    assert any(error["type"] == "BackendUnavailable" for case in output["cases"] for error in case["errors"])


@pytest.mark.timeout(PROGRAM_TIMEOUT_SECONDS + 60)
@pytest.mark.parametrize("service", ["tinker", "weaver", "mint"])
def test_backend_survives_expired_sessions(
    service: str, model: Path, fork_server: ForkServer, tmp_path: Path
) -> None:
    output = run_program(service, "idle", model, fork_server, tmp_path, SESSION_TTL_SECONDS)
    errors = [error for case in output["cases"] for error in case["errors"]]
    assert {error["type"] for error in errors} == {"BackendLost"}, errors
    assert len(errors) > len(output["cases"]) // 2
    for case in output["cases"]:
        check_case(case, output["baseline"])
