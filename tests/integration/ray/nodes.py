"""Ray nodes on one machine, each in a network namespace with an address of its own, behind one bridge, and
with a folder that the others do not see."""

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

PORT = 6379
ROOT = Path(__file__).parents[3]


def require_namespaces() -> None:
    """Skips where they cannot be made."""
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("the command ip is not installed (Debian: iproute2)")
    probe = f"instar-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode != 0:
        pytest.skip("this machine lets nobody make network namespaces")
    subprocess.run(["ip", "netns", "del", probe], check=True)


class Network:
    """A bridge, with this machine at its `.254`."""

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
    """Started when made; ``head`` is the node that the others join."""

    def __init__(
        self, network: Network, name: str, number: int, folder: Path, head: RayNode | None, **resources: float
    ) -> None:
        self.name = name
        self.namespace = f"{network.bridge}-{name}"
        self.runs_folder = folder / f"own-{name}"
        """What it has as `runs` in the folder."""
        self._mount_point = folder / "runs"
        for each in (self.runs_folder, self._mount_point):
            each.mkdir(exist_ok=True)
        self.address = f"{network.prefix}.{number}"
        self._interface = f"{network.bridge[-8:]}{name}"
        self._token = folder / "token"
        if head is None:
            self._token.write_text(secrets.token_hex(32))
            self._token.chmod(0o600)
        self._join_network(network)
        self.cluster_address = f"{(head or self).address}:{PORT}"
        first = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        role = first if head is None else [f"--address={self.cluster_address}"]
        command = [
            str(Path(sys.executable).with_name("ray")), "start", *role, "--block", "--disable-usage-stats",
            f"--node-ip-address={self.address}", f"--temp-dir={folder / name}",
            "--num-cpus=4", "--object-store-memory=80000000", f"--resources={json.dumps(resources)}",
        ]  # fmt: skip
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.wrap_command(command),
                cwd=ROOT,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def environment(self, **more: str) -> dict[str, str]:
        ray = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_worker_prestart": "0",
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_worker_niceness": "0",
        }
        return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **ray, **more}

    def wrap_command(self, command: list[str]) -> list[str]:
        """The command, to be run on this node."""
        mounting = f'mount --bind {self.runs_folder} {self._mount_point} && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", mounting, "sh", *command]

    def wait(self, timeout: float = 90) -> None:
        deadline = time.monotonic() + timeout
        while "Ray runtime started" not in (said := self._log.read_text(errors="replace")):
            assert self._process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.1)

    def disconnect(self) -> None:
        """It reaches nobody any more, and nobody reaches it; its processes go on."""
        _run_ip("link", "set", self._interface, "down")

    def remove(self) -> None:
        for pid in _list_pids(self.namespace):
            os.kill(pid, signal.SIGKILL)
        self._process.wait(10)
        _run_ip("netns", "del", self.namespace)

    def _join_network(self, network: Network) -> None:
        inside = "eth0"
        _run_ip("netns", "add", self.namespace)
        _run_ip(
            "link", "add", self._interface, "type", "veth", "peer", "name", inside, "netns", self.namespace
        )
        _run_ip("link", "set", self._interface, "master", network.bridge, "up")
        for command in (
            ["addr", "add", f"{self.address}/24", "dev", inside],
            ["link", "set", inside, "up"],
            ["link", "set", "lo", "up"],
            ["route", "add", "default", "via", network.address],
        ):
            _run_ip("-n", self.namespace, *command)


def _run_ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def _list_pids(namespace: str) -> list[int]:
    told = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    return [int(pid) for pid in told.stdout.split()]
