"""Every adapter over a bad line: it gets over what passes, and of what does not it tells within its deadline.
Whatever happened, the numbers are those of an undisturbed run: nothing was trained twice, nothing lost."""

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
from tests.integration.backends.environments import interpreter
from tests.integration.backends.faulty_proxy import FAULTS, TRANSIENT_FAULTS
from tests.tiny import make_tiny_model
from tests.torture.certificates import single_certificate_env
from tests.torture.fork_server import ROOT, ForkServer
from tests.torture.service_run import ServiceProcess

pytestmark = pytest.mark.alone
PROGRAM_SECONDS = 400
SLACK = 4.0
"""Seconds over its deadline that a call may take, on a machine that is busy."""
LONGEST_STALL = 1.0
FORGETS = 2.5
"""Seconds after which the service forgets a session that says nothing."""
HALVES = {"tinker": "even", "mint": "odd", "weaver": "faults"}
"""Tinker's and MinT's adapter is the same, and so is what they ask for: half of the faults for each SDK."""
CALLS = {
    "tinker": ("forward_backward", "optim_step", "save_weights", "load_weights", "asample", "create_model"),
    "mint": ("forward", "forward_backward", "optim_step", "save_weights", "load_weights", "asample"),
    "weaver": ("forward-passes", "forward-backward-passes", "optimizer-steps", "export-sampler", "load"),
}
"""Some of what is asked for, and so where faults have struck."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=256)


@pytest.fixture(scope="module")
def nursery() -> Generator[ForkServer]:
    nursery = ForkServer("tests.torture.service_server", "peft")
    yield nursery
    nursery.close()


def play(
    service: str, what: str, model: Path, nursery: ForkServer, folder: Path, ttl: float
) -> dict[str, Any]:
    """What the program tells; the service's server runs beside it."""
    served = ServiceProcess(PROTOCOLS[service], model, folder, nursery, ttl)
    served.start()
    served.wait_until_listening()
    python = str(interpreter("mint")) if service == "mint" else sys.executable
    command = [python, "-m", "tests.integration.backends.faults_program", service, served.url]
    env = {
        **os.environ,
        **single_certificate_env(),
        SERVICES[service].key_env: served.key,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            [*command, str(model), str(folder / "work"), what],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS,
        )
    finally:
        nursery.kill()
    assert done.returncode == 0, done.stderr[-3000:]
    assert served.key not in done.stdout + done.stderr + served.output.read_text()
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["longest_stall"] < LONGEST_STALL
    return told


def check_outcome(case: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    for error in case["errors"]:
        assert error["expected"], f"an error that nobody reckons with: {error}"
        assert len(error["text"]) > 10
        assert not error["key_shown"]
        assert error["seconds"] < case["deadline"] + SLACK, error
    assert case["closing"] < SLACK
    told = case["told"]
    for exact in ("before", "after", "sampled", "versions"):
        assert told[exact] == undisturbed[exact], exact
    for name in ("scored", "reference"):  # which others are computed beside is in their last digit
        np.testing.assert_allclose(np.ravel(told[name]), np.ravel(undisturbed[name]), atol=1e-5)


@pytest.mark.timeout(PROGRAM_SECONDS + 60)
@pytest.mark.parametrize("service", ["tinker", "weaver", "mint"])
def test_backend_survives_connection_faults(
    service: str, model: Path, nursery: ForkServer, tmp_path: Path
) -> None:
    told = play(service, HALVES[service], model, nursery, tmp_path, 600.0)
    for call in CALLS[service]:
        assert any(place.endswith(f"/{call}") or place == f"POST {call}" for place in told["places"]), call
    for case in told["cases"]:
        where = f"{case['fault']} at {case['place']}: {case['errors']}"
        # On a busy machine a short deadline may pass before the fault has come.
        assert case["struck"] or case["errors"], where
        try:
            check_outcome(case, told["undisturbed"])
        except AssertionError as error:
            raise AssertionError(where) from error
        if case["fault"] in TRANSIENT_FAULTS and not case["lasts"]:
            assert not case["errors"], where
    assert {case["fault"] for case in told["cases"]} == {fault.name for fault in FAULTS}
    assert any(error["error"] == "BackendUnavailable" for case in told["cases"] for error in case["errors"])


@pytest.mark.timeout(PROGRAM_SECONDS + 60)
@pytest.mark.parametrize("service", ["tinker", "weaver", "mint"])
def test_backend_survives_expired_sessions(
    service: str, model: Path, nursery: ForkServer, tmp_path: Path
) -> None:
    told = play(service, "idle", model, nursery, tmp_path, FORGETS)
    lost = [error for case in told["cases"] for error in case["errors"]]
    assert {error["error"] for error in lost} == {"BackendLost"}, lost
    assert len(lost) > len(told["cases"]) // 2
    for case in told["cases"]:
        check_outcome(case, told["undisturbed"])
