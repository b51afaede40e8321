"""Ray nodes on one machine, connected by a bridge.

Each node has its own network namespace, address and folder.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RAY_PORT = 6379
ROOT = Path(__file__).parents[3]


def require_namespaces() -> None:
    """Skip the test if network namespaces cannot be created."""
    if os.getuid() != 0:
        pytest.skip("creating network namespaces requires root")
    if shutil.which("ip") is None:
        pytest.skip("the `ip` command is not installed (Debian package iproute2)")
    probe = f"instar-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode != 0:
        pytest.skip("network namespaces cannot be created on this machine")
    subprocess.run(["ip", "netns", "del", probe], check=True)


class Network:
    """A network bridge, on which this machine has the address `.254`."""

    def __init__(self) -> None:
        number = os.getpid() % 250
        self.bridge = f"instar{os.getpid() % 100_000}"
        self.prefix = f"10.{177 + number % 50}.{number}"
        self.address = f"{self.prefix}.254"
        _run_ip("link", "add", self.bridge, "type", "bridge")
        _run_ip("addr", "add", f"{self.address}/24", "dev", self.bridge)
        _run_ip("link", "set", self.bridge, "up")

    def remove(self) -> None:
        _run_ip("link", "del", self.bridge)


class RayNode:
    """A Ray node, started by the constructor. It joins ``head``, or is the head node if ``head`` is None."""

    def __init__(
        self, network: Network, name: str, number: int, folder: Path, head: RayNode | None, **resources: float
    ) -> None:
        self.name = name
        self.namespace = f"{network.bridge}-{name}"
        self.runs_folder = folder / f"own-{name}"
        """The node's own folder, which it sees as `runs`."""
        self._mount_point = folder / "runs"
        for created_folder in (self.runs_folder, self._mount_point):
            created_folder.mkdir(exist_ok=True)
        self.address = f"{network.prefix}.{number}"
        self._interface = f"{network.bridge[-8:]}{name}"
        self._token_path = folder / "token"
        if head is None:
            self._token_path.write_text(secrets.token_hex(32))
            self._token_path.chmod(0o600)
        self._join_network(network)
        self.cluster_address = f"{(head or self).address}:{RAY_PORT}"
        head_options = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        role_options = head_options if head is None else [f"--address={self.cluster_address}"]
        command = [
            str(Path(sys.executable).with_name("ray")), "start", *role_options, "--block",
            "--disable-usage-stats", f"--node-ip-address={self.address}", f"--temp-dir={folder / name}",
            "--num-cpus=4", "--object-store-memory=80000000", f"--resources={json.dumps(resources)}",
        ]  # fmt: skip
        self._log_path = folder / f"{name}.log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.wrap_command(command),
                cwd=ROOT,
                env=self.make_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def make_environment(self, **variables: str) -> dict[str, str]:
        ray_variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token_path),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_worker_prestart": "0",
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_worker_niceness": "0",
        }
        return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **ray_variables, **variables}

    def wrap_command(self, command: list[str]) -> list[str]:
        """Return the command that runs ``command`` on this node."""
        mount_and_run = f'mount --bind {self.runs_folder} {self._mount_point} && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", mount_and_run, "sh", *command]

    def wait_until_started(self, timeout_seconds: float = 90) -> None:
        deadline = time.monotonic() + timeout_seconds
        while "Ray runtime started" not in (log := self._log_path.read_text(errors="replace")):
            assert self._process.poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.1)

    def disconnect(self) -> None:
        """Disconnect the node from the network, but leave its processes running."""
        _run_ip("link", "set", self._interface, "down")

    def remove(self) -> None:
        """Kill all processes of the node and delete its network namespace."""
        for pid in _list_pids(self.namespace):
            os.kill(pid, signal.SIGKILL)
        self._process.wait(10)
        _run_ip("netns", "del", self.namespace)

    def _join_network(self, network: Network) -> None:
        interface = "eth0"
        _run_ip("netns", "add", self.namespace)
        _run_ip(
            "link", "add", self._interface, "type", "veth", "peer", "name", interface, "netns", self.namespace
        )
        _run_ip("link", "set", self._interface, "master", network.bridge, "up")
        for command in (
            ["addr", "add", f"{self.address}/24", "dev", interface],
            ["link", "set", interface, "up"],
            ["link", "set", "lo", "up"],
            ["route", "add", "default", "via", network.address],
        ):
            _run_ip("-n", self.namespace, *command)


def _run_ip(*arguments: str) -> None:
    completed = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert completed.returncode == 0, f"ip {' '.join(arguments)}: {completed.stderr}"


def _list_pids(namespace: str) -> list[int]:
    completed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    return [int(pid) for pid in completed.stdout.split()]
