"""Install each peer into its own environment and start it in front of the stub."""

from __future__ import annotations

import contextlib
import importlib.metadata
import secrets
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from gateway_parts.load import Target
from gateway_parts.processes import (
    MeasurementError,
    find_free_port,
    read_log_tail,
    start_process,
    wait_until_up,
)
from packaging.requirements import Requirement

Log = Callable[[str], None]


@dataclass(frozen=True)
class Launch:
    """The command that starts a peer in its own folder, and how requests are sent to it."""

    command: Sequence[str | Path]
    health_path: str
    key: str = "none"
    session_path: str = "/v1/chat/completions"
    """The path of a session's requests. May contain the placeholder ``{session}``."""
    env: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Peer:
    name: str
    label: str
    steps: Sequence[Sequence[str]]
    """The arguments of each `pip install` command."""
    launch: Callable[[Path, Path, str, int], Launch]
    """Called with the environment's bin folder, a working folder, the stub's base URL and a port."""
    extra_requirements: tuple[str, str, str] | None = None
    """(package, extra, pin): also install the package's requirements, including those of the extra. The pin
    replaces one of them."""


@contextlib.contextmanager
def start_peer(peer: Peer, environment: Path, folder: Path, stub_url: str) -> Generator[Target]:
    folder.mkdir(parents=True)
    port = find_free_port()
    launch = peer.launch(environment / "bin", folder, stub_url, port)
    url, log_path = f"http://127.0.0.1:{port}", folder / "log"
    env = {"HOME": str(folder), "PYTHONWARNINGS": "ignore", **launch.env}
    with start_process(launch.command, log_path, env=env, cwd=folder) as process:
        wait_until_up(process, url + launch.health_path, log_path)
        sessions = [(launch.session_path.format(session=f"bench-{n}"), launch.key) for n in range(256)]
        yield Target(peer.name, peer.label, url, sessions, process.pid)


def install_peer(peer: Peer, environment: Path, log: Log) -> None:
    """Install the peer into its own virtual environment, unless an earlier run has already done so."""
    install_packages(environment, peer.label, peer.steps, log, peer.extra_requirements)


def install_packages(
    environment: Path,
    label: str,
    steps: Sequence[Sequence[str]],
    log: Log,
    extra_requirements: tuple[str, str, str] | None = None,
) -> None:
    """Create the virtual environment, unless it exists and was installed with the same arguments."""
    specification = repr((steps, extra_requirements))
    marker = environment / "installed"
    if marker.is_file() and marker.read_text() == specification:
        return
    log(f"installing {label} into {environment}")
    log_path = environment.with_suffix(".log")
    environment.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", "--clear", environment], log_path)
    for step in steps:
        _pip_install(environment, step, log_path, log)
    if extra_requirements:
        _pip_install(environment, _list_requirements(environment, *extra_requirements), log_path, log)
    marker.write_text(specification)


def _pip_install(environment: Path, arguments: Sequence[str], log_path: Path, log: Log) -> None:
    shortened = arguments if len(arguments) < 5 else [*arguments[:3], f"and {len(arguments) - 3} more"]
    log(f"  pip install {' '.join(shortened)}")
    _run([environment / "bin" / "pip", "install", "--quiet", *arguments], log_path)


def _list_requirements(environment: Path, package: str, extra: str, pin: str) -> list[str]:
    """Return the requirements of an installed package and its extra, with one of them replaced by the pin."""
    site = next((environment / "lib").glob("python*/site-packages"))
    (distribution,) = importlib.metadata.distributions(name=package, path=[str(site)])
    requirements = [Requirement(line) for line in distribution.requires or ()]
    pinned = Requirement(pin).name
    selected = [
        requirement
        for requirement in requirements
        if requirement.name != pinned
        and (not requirement.marker or requirement.marker.evaluate({"extra": extra}))
    ]
    for requirement in selected:
        requirement.marker = None
    return [pin, *map(str, selected)]


def _run(command: Sequence[str | Path], log_path: Path) -> None:
    with log_path.open("ab") as output:
        code = subprocess.run(list(map(str, command)), stdout=output, stderr=output, check=False).returncode
    if code != 0:
        raise MeasurementError(f"the installation failed: {read_log_tail(log_path)} (see {log_path})")


# --- the peers ----------------------------------------------------------------------------------


def _launch_litellm(bin_folder: Path, folder: Path, stub_url: str, port: int) -> Launch:
    key = f"sk-{secrets.token_urlsafe(24)}"
    litellm_params = {"model": "openai/bench", "api_base": stub_url, "api_key": "none"}
    settings = {
        "model_list": [{"model_name": "bench", "litellm_params": litellm_params}],
        "general_settings": {"master_key": key},
    }
    config_path = folder / "config.yaml"
    config_path.write_text(yaml.safe_dump(settings))
    return Launch(
        [
            bin_folder / "litellm",
            "--config",
            config_path,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--num_workers",
            "1",
        ],
        health_path="/health/liveliness",
        key=key,
        env={"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )


def _launch_rllm(bin_folder: Path, folder: Path, stub_url: str, port: int) -> Launch:
    settings = {
        "host": "127.0.0.1",
        "port": port,
        "workers": [{"url": stub_url, "model_name": "bench"}],
        "db_path": str(folder / "traces.db"),
        "sync_traces": True,
        "log_level": "WARNING",
    }
    config_path = folder / "config.yaml"
    config_path.write_text(yaml.safe_dump(settings))
    return Launch(
        [bin_folder / "rllm-model-gateway", "--config", config_path],
        health_path="/health",
        session_path="/sessions/{session}/v1/chat/completions",
    )


def _launch_metaclaw(bin_folder: Path, folder: Path, stub_url: str, port: int) -> Launch:
    settings = {
        "mode": "skills_only",
        "llm": {"provider": "custom", "model_id": "bench", "api_base": stub_url, "api_key": "none"},
        "proxy": {"host": "127.0.0.1", "port": port},
        "skills": {"enabled": True, "dir": str(folder / "skills"), "auto_evolve": False},
    }
    home = folder / ".metaclaw"
    home.mkdir()
    (home / "config.yaml").write_text(yaml.safe_dump(settings))
    return Launch(
        [bin_folder / "metaclaw", "start", "--mode", "skills_only", "--port", str(port)],
        health_path="/healthz",
    )


PEERS = [
    Peer(
        "litellm",
        "LiteLLM proxy 1.108.4",
        # LiteLLM requires a certifi release that may not be available, so this one replaces it.
        steps=[["--no-deps", "litellm==1.108.4"]],
        extra_requirements=("litellm", "proxy", "certifi==2026.10.18"),
        launch=_launch_litellm,
    ),
    Peer("rllm", "rLLM gateway 0.1.0", steps=[["rllm-model-gateway==0.1.0"]], launch=_launch_rllm),
    Peer(
        "metaclaw",
        "MetaClaw 0.4.1.2",
        steps=[["torch==2.13.0"], ["aiming-metaclaw[evolve]==0.4.1.2"]],
        launch=_launch_metaclaw,
    ),
]
