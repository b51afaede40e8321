"""Test that only the trainer receives a training service's API key, and that it does not appear in the
environment of agents, in the output or in the files of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny import make_tiny_model

KEY = "tml-0123456789-test-secret"
ROOT = Path(__file__).parents[2]
AGENT_SOURCE = """
import json, os, subprocess, sys
from pathlib import Path


def tasks():
    return [{"number": 1}, {"number": 2}]


async def agent(task, session, *, output):
    child = subprocess.run([sys.executable, "-c", "import os; print(dict(os.environ))"], capture_output=True)
    Path(output).write_text(json.dumps([dict(os.environ), child.stdout.decode()]))
    return 1.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


class KeyEchoingHandler(BaseHTTPRequestHandler):
    """A service that rejects every key and echoes it in the error message, as some services do."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = self.headers.get("X-API-Key") or self.headers.get("X-WEAVER-API-KEY")
        body = json.dumps({"error": "unauthorized", "message": f"Incorrect API key provided: {key}"}).encode()
        self.send_response(401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def service_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), KeyEchoingHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def make_config(folder: Path, model: Path, **backend_settings: Any) -> dict[str, Any]:
    return {
        "name": "secrets",
        "dir": str(folder / "run"),
        "model": {"name": str(model), "dtype": "fp32", "device": "cpu"},
        "engine": {"type": "scripted"},
        "backend": {"deadline": 20, **backend_settings},
        "trainer": {"mode": "sync", "steps": 1, "tensorboard": False},
        "rollout": {
            "tasks": {"type": "python", "function": "agent_module:tasks"},
            "agent": {
                "type": "function",
                "function": "agent_module:agent",
                "args": {"output": str(folder / "environments.json")},
            },
        },
        "eval": {"tasks": {"type": "python", "function": "agent_module:tasks"}, "modes": {"greedy": {}}},
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("backend", "env"),
    [
        ({"type": "tinker", "api_key": KEY}, {"TINKER_API_KEY": f"{KEY}-another"}),
        ({"type": "weaver"}, {"WEAVER_API_KEY": KEY, "COPY": f"Bearer {KEY}"}),
    ],
    ids=["key in file", "key in environment"],
)
def test_service_key_is_visible_only_to_the_trainer(
    model: Path, service_url: str, tmp_path: Path, backend: dict[str, str], env: dict[str, str]
) -> None:
    (tmp_path / "agent_module.py").write_text(AGENT_SOURCE)
    config_path = tmp_path / "run.yaml"
    config_path.write_text(yaml.safe_dump(make_config(tmp_path, model, base_url=service_url, **backend)))
    base_env = {
        name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "_BASE_URL"))
    }
    completed = subprocess.run(
        [sys.executable, "-m", "instar.cli.main", "train", str(config_path), "--json"],
        cwd=ROOT,
        env={**base_env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=280,
    )
    output = completed.stdout + completed.stderr
    assert completed.returncode == 1, output
    assert "trainer: " in output, "the trainer did not reach the service"
    assert KEY not in output
    agent_env, child_env = json.loads((tmp_path / "environments.json").read_text())
    assert KEY not in json.dumps(agent_env) + child_env
    assert agent_env["PATH"], "the other variables must be inherited"
    run_files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.json", "store.db", "trainer.log"} <= {path.name for path in run_files}
    assert [path for path in run_files if KEY.encode() in path.read_bytes()] == []
