"""Tests for runs on a three-node Ray cluster: a lost node, killed roles, and the rejection of SQLite."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import pytest
import yaml

from tests.integration.ray.nodes import ROOT, Network, RayNode, require_namespaces
from tests.postgres import PASSWORD, PostgresTestServer
from tests.tiny import make_tiny_model

WORKLOAD_MODULE = "tests.integration.ray.workload"
STEPS = 26
PASSWORD_ENV = "INSTAR_TEST_PASSWORD"
ADMIN_KEY = secrets.token_urlsafe(32)


class ThreeNodeCluster:
    """Three nodes. The head runs the gateway, the rollout and the driver; the others run engines and the
    trainer."""

    def __init__(self, stack: ExitStack) -> None:
        require_namespaces()
        # Ray creates its sockets in this folder, and socket paths must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="instar-ray-", dir="/tmp"))
        stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.network = Network()
        stack.callback(self.network.remove)
        self.postgres = PostgresTestServer(host=self.network.address)
        stack.callback(self.postgres.remove)
        self.head = self._add_node(stack, "a", 1, None, front=1)
        self.head.wait_until_started()
        self.trainer_node = self._add_node(stack, "b", 2, self.head, engines=2, trainer=1)
        self.failing_node = self._add_node(stack, "c", 3, self.head, engines=1)
        self.trainer_node.wait_until_started()
        self.failing_node.wait_until_started()

    def _add_node(
        self, stack: ExitStack, name: str, number: int, head: RayNode | None, **resources: float
    ) -> RayNode:
        node = RayNode(self.network, name, number, self.folder, head, **resources)
        stack.callback(node.remove)
        return node


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreeNodeCluster]:
    with ExitStack() as stack:
        yield ThreeNodeCluster(stack)


class RayRun:
    """`instar train` on the head node."""

    def __init__(self, cluster: ThreeNodeCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.run_dir = cluster.folder / "runs" / "three"
        self.driver_folder = cluster.head.runs_folder / "three"
        """The run's folder on the driver's node."""
        self.schema = cluster.postgres.make_schema_name()
        self.output = folder / "output.txt"
        config_path = folder / "run.yaml"
        config_path.write_text(yaml.safe_dump(self._make_settings()))
        command = [sys.executable, "-m", "instar.cli.main", "train", str(config_path), "--json"]
        head = cluster.head
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                head.wrap_command(command),
                cwd=ROOT,
                env=head.make_environment(
                    **{
                        "RAY_ADDRESS": head.cluster_address,
                        PASSWORD_ENV: PASSWORD,
                        "INSTAR_ADMIN_KEY": ADMIN_KEY,
                    }
                ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _make_settings(self) -> dict[str, Any]:
        def request_resources(**resources: float) -> dict[str, Any]:
            return {"cpus": 0.1, "resources": resources}

        placement = {
            "gateway": request_resources(front=0.1),
            "rollout": request_resources(front=0.1),
            "trainer": request_resources(trainer=1),
            "engine": request_resources(engines=1),
        }
        return {
            "name": "three",
            "dir": str(self.run_dir),
            "seed": 0,
            "model": {
                "name": str(self.folder / "model"), "dtype": "fp32", "device": "cpu", "max_context": 128
            },
            "store": {
                "type": "postgres",
                "url": self.cluster.postgres.tcp_url,
                "db_schema": self.schema,
                "password_env": PASSWORD_ENV,
            },
            "cluster": {"type": "ray", "node_timeout": 6, "placement": placement},
            "gateway": {"port": 0},
            "engine": {"type": "local", "threads": 1, "count": 2},
            "backend": {"type": "local", "threads": 1, "lora": {"rank": 8, "alpha": 16}},
            "trainer": {
                "steps": STEPS,
                "groups_per_step": 2,
                "adam": {"lr": 1e-2},
                "max_kl": None,  # a random model must change more than a trained one
                "warmup_steps": 0,
                "checkpoint_every": 4,
                "tensorboard": False,
            },
            "rollout": {
                "tasks": {"type": "python", "function": f"{WORKLOAD_MODULE}:make_tasks"},
                "agent": {
                    "type": "function",
                    "function": f"{WORKLOAD_MODULE}:agent",
                    # Slow the run down, so that it does not finish before the last role is killed.
                    "args": {"ledger": str(self.ledger), "pause_seconds": 1.0},
                },
                "group_size": 16,
                "concurrency": 32,
                "retries": 6,
                "timeout": 120,
            },
            "reward": {"type": "rule", "function": f"{WORKLOAD_MODULE}:score_characters"},
        }  # fmt: skip

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.txt"

    def query(self, sql: str, *values: object) -> list[Any]:
        return self.cluster.postgres.query(sql, *values, schema=self.schema)

    def count_published_steps(self) -> int:
        """Return the number of steps that are published or committed, or 0 if there are no tables yet."""
        try:
            return self.query("SELECT COUNT(*) FROM steps WHERE version IS NOT NULL")[0][0]
        except Exception:  # noqa: BLE001 the tables do not exist yet
            return 0

    def read_endpoint(self, name: str) -> tuple[str, int, str]:
        """Return the URL, the process id and the status that the role registered in the store."""
        (row,) = self.query("SELECT url, pid, doing FROM endpoints WHERE name = %s", name)
        return row

    def wait_until(self, condition: Callable[[], bool], timeout_seconds: float = 120) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            assert self.process.poll() is None, f"the run has ended\n{self.collect_logs()}"
            assert time.monotonic() < deadline, (
                f"the condition is still false after {timeout_seconds:g} s\n{self.collect_logs()}"
            )
            time.sleep(0.05)

    def finish(self, timeout_seconds: float) -> None:
        """Wait for the run to exit. It must exit in time and with status 0."""
        try:
            code = self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not finish within {timeout_seconds:g} s\n{self.collect_logs()}")
        assert code == 0, f"exit code {code}\n{self.collect_logs()}"

    def collect_logs(self) -> str:
        parts = [self.output.read_text(errors="replace")[-6000:]]
        for log_path in sorted(self.cluster.folder.glob("own-*/three/logs/*.log")):
            parts.append(f"--- {log_path}\n{log_path.read_text(errors='replace')[-2500:]}")
        return "\n".join(parts)


@pytest.fixture
def run(cluster: ThreeNodeCluster, tmp_path: Path) -> Iterator[RayRun]:
    make_tiny_model(tmp_path / "model", seed=0, std=0.2)
    ray_run = RayRun(cluster, tmp_path)
    yield ray_run
    if ray_run.process.poll() is None:
        ray_run.process.kill()
        ray_run.process.wait()


@pytest.mark.timeout(120)
def test_ray_cluster_with_several_nodes_rejects_a_sqlite_store(
    cluster: ThreeNodeCluster, tmp_path: Path
) -> None:
    config_path = tmp_path / "run.yaml"
    config_path.write_text(yaml.safe_dump({"dir": str(tmp_path / "run"), "cluster": {"type": "ray"}}))
    head = cluster.head
    completed = subprocess.run(
        head.wrap_command(
            [
                sys.executable,
                "-m",
                "instar.cli.main",
                "serve",
                str(config_path),
                "--set",
                "engine.type=scripted",
            ]
        ),
        cwd=ROOT,
        env=head.make_environment(RAY_ADDRESS=head.cluster_address),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert completed.returncode == 1, completed.stdout + completed.stderr
    assert "error: store.type: sqlite only works on one machine" in completed.stdout + completed.stderr
    assert "3 nodes; use postgres" in completed.stdout + completed.stderr


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_run_on_three_nodes_survives_a_lost_node_and_killed_roles(
    cluster: ThreeNodeCluster, run: RayRun
) -> None:
    run.wait_until(lambda: run.count_published_steps() >= 3)
    hosts = {
        name: run.read_endpoint(name)[0].split("//")[1].split(":")[0] for name in ("engine-0", "engine-1")
    }
    assert sorted(hosts.values()) == [cluster.trainer_node.address, cluster.failing_node.address]
    assert cluster.head.address in run.read_endpoint("gateway")[0]
    (moved_engine,) = [name for name, host in hosts.items() if host == cluster.failing_node.address]

    # The engine restarts on a node that cannot read the trainer's folder, but must load the newest version.
    killed_pid = run.read_endpoint(moved_engine)[1]
    os.kill(killed_pid, signal.SIGKILL)
    run.wait_until(
        lambda: (
            run.read_endpoint(moved_engine)[1] != killed_pid
            and "running" in run.read_endpoint(moved_engine)[2]
        )
    )

    disconnected_pid = run.read_endpoint(moved_engine)[1]
    cluster.failing_node.disconnect()
    steps = run.count_published_steps()
    run.wait_until(lambda: cluster.trainer_node.address in run.read_endpoint(moved_engine)[0])
    # An engine that cannot reach the driver must exit.
    run.wait_until(lambda: not Path(f"/proc/{disconnected_pid}").exists())
    run.wait_until(lambda: run.count_published_steps() >= steps + 2)

    assert any(kill_gateway_mid_reply(run) for _ in range(3)), (
        "no reply was in progress when the gateway was killed"
    )
    assert send_chat(run) == 200, "a request during the restart must wait for the gateway"
    steps = run.count_published_steps()
    run.wait_until(lambda: run.count_published_steps() >= steps + 2)

    run.wait_until(lambda: run.read_endpoint("trainer")[2].startswith("step "))
    os.kill(run.read_endpoint("trainer")[1], signal.SIGKILL)
    run.finish(240)

    assert_consistent(run)
    output = run.output.read_text()
    assert f"{moved_engine} exited (signal SIGKILL); restarting it" in output
    assert f"{moved_engine} was lost" in output
    assert "trainer exited (signal SIGKILL); restarting it" in output
    assert "gateway exited (signal SIGKILL); restarting it" in output
    rewards = [record["reward_mean"] for record in read_train_metrics(run)]
    assert rewards[0] < 0.2
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.3, [round(reward, 2) for reward in rewards]


CHAT_BODY = {"model": "m", "messages": [{"role": "user", "content": "digits"}], "max_tokens": 100}


def kill_gateway_mid_reply(run: RayRun) -> bool:
    """Kill the gateway during a streamed reply. Return False if the reply arrived completely anyway."""
    url, pid, _ = run.read_endpoint("gateway")
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    is_complete = False
    with (
        contextlib.suppress(httpx.TransportError),
        httpx.stream(
            "POST",
            f"{url}/v1/chat/completions",
            json={**CHAT_BODY, "stream": True},
            headers=headers,
            timeout=60,
        ) as response,
    ):
        assert response.status_code == 200, response.read()
        for number, line in enumerate(response.iter_lines()):
            if number == 0:
                os.kill(pid, signal.SIGKILL)
            is_complete = is_complete or "[DONE]" in line
    return not is_complete


def send_chat(run: RayRun) -> int:
    """Send a chat request and return the status of the response."""
    url = run.read_endpoint("gateway")[0]
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    return httpx.post(f"{url}/v1/chat/completions", json=CHAT_BODY, headers=headers, timeout=120).status_code


def read_train_metrics(run: RayRun) -> list[dict[str, Any]]:
    """Return the latest record of each step in the driver's metrics file."""
    latest: dict[int, dict[str, Any]] = {}
    for line in (run.driver_folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "train":
            latest[record["step"]] = record
    return [latest[step] for step in sorted(latest)]


def assert_consistent(run: RayRun) -> None:
    steps = run.query("SELECT step, state FROM steps ORDER BY step")
    assert steps == [(step, "committed") for step in range(1, STEPS + 1)]
    duplicates = run.query("SELECT sample_key FROM claims GROUP BY epoch, sample_key HAVING COUNT(*) > 1")
    assert not duplicates, f"claimed twice: {duplicates}"
    unfinished = run.query(
        "SELECT c.session_id FROM claims c JOIN sessions s USING (session_id) "
        "WHERE c.outcome = 'trained' AND s.status != 'completed'"
    )
    assert not unfinished, f"trained on sessions that were not completed: {unfinished}"
    received = set(run.ledger.read_text().splitlines())
    stored = {row[0] for row in run.query("SELECT request_id FROM calls WHERE status = 'ok'")}
    assert received <= stored, f"received by the agent but not recorded: {sorted(received - stored)}"
    trained = run.query(
        "SELECT DISTINCT l.request_id FROM claims c JOIN calls l USING (session_id) "
        "WHERE c.outcome = 'trained'"
    )
    assert {row[0] for row in trained} <= received, "trained on a reply that the agent did not receive"
