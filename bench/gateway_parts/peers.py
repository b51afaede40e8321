"""The peers: how each is installed into an environment of its own, and started in front of the stub."""

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
from gateway_parts.processes import DidNotStart, free_port, last_words, running, until_up
from packaging.requirements import Requirement

Log = Callable[[str], None]


@dataclass(frozen=True)
class Launch:
    """How to start a peer in a folder of its own, and how to talk to it."""

    command: Sequence[str | Path]
    health: str
    key: str = "none"
    session_path: str = "/v1/chat/completions"
    env: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Peer:
    name: str
    label: str
    steps: Sequence[Sequence[str]]
    """Arguments of `pip install`, one step after the other."""
    launch: Callable[[Path, Path, str, int], Launch]
    """Given its environment's bin, a folder, the stub's base URL and a port."""
    extras_of: tuple[str, str, str] | None = None
    """(package, extra, pin): install what the package asks for with this extra, but with the pin."""


@contextlib.contextmanager
def started(peer: Peer, environment: Path, folder: Path, stub_url: str) -> Generator[Target]:
    folder.mkdir(parents=True)
    port = free_port()
    launch = peer.launch(environment / "bin", folder, stub_url, port)
    url, log = f"http://127.0.0.1:{port}", folder / "log"
    env = {"HOME": str(folder), "PYTHONWARNINGS": "ignore", **launch.env}
    with running(launch.command, log=log, env=env, cwd=folder) as process:
        until_up(process, url + launch.health, log)
        sessions = [(launch.session_path.format(session=f"bench-{n}"), launch.key) for n in range(256)]
        yield Target(peer.name, peer.label, url, sessions, process.pid)


def install(peer: Peer, environment: Path, log: Log) -> None:
    """Into its own virtual environment, once: a later run finds the recipe it was made with."""
    recipe = repr((peer.steps, peer.extras_of))
    marker = environment / "installed"
    if marker.is_file() and marker.read_text() == recipe:
        return
    log(f"installing {peer.label} into {environment}")
    output = environment.with_suffix(".log")
    environment.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", "--clear", environment], output)
    for step in peer.steps:
        _pip(environment, step, output, log)
    if peer.extras_of:
        _pip(environment, _requirements(environment, *peer.extras_of), output, log)
    marker.write_text(recipe)


def _pip(environment: Path, arguments: Sequence[str], output: Path, log: Log) -> None:
    shown = arguments if len(arguments) < 5 else [*arguments[:3], f"and {len(arguments) - 3} more"]
    log(f"  pip install {' '.join(shown)}")
    _run([environment / "bin" / "pip", "install", "--quiet", *arguments], output)


def _requirements(environment: Path, package: str, extra: str, pin: str) -> list[str]:
    """What an installed package asks for, less what the pin is there to replace."""
    site = next((environment / "lib").glob("python*/site-packages"))
    (distribution,) = importlib.metadata.distributions(name=package, path=[str(site)])
    asked = [Requirement(line) for line in distribution.requires or ()]
    pinned = Requirement(pin).name
    wanted = [r for r in asked if r.name != pinned and (not r.marker or r.marker.evaluate({"extra": extra}))]
    for requirement in wanted:
        requirement.marker = None
    return [pin, *map(str, wanted)]


def _run(command: Sequence[str | Path], output: Path) -> None:
    with output.open("ab") as sink:
        code = subprocess.run(list(map(str, command)), stdout=sink, stderr=sink, check=False).returncode
    if code != 0:
        raise DidNotStart(f"not installed: {last_words(output)} (log: {output})")


# --- the peers ----------------------------------------------------------------------------------


def _litellm(bin: Path, folder: Path, stub_url: str, port: int) -> Launch:
    key = f"sk-{secrets.token_urlsafe(24)}"
    behind = {"model": "openai/bench", "api_base": stub_url, "api_key": "none"}
    settings = {
        "model_list": [{"model_name": "bench", "litellm_params": behind}],
        "general_settings": {"master_key": key},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    return Launch(
        [bin / "litellm", "--config", file, "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"],
        health="/health/liveliness",
        key=key,
        env={"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )


def _rllm(bin: Path, folder: Path, stub_url: str, port: int) -> Launch:
    settings = {
        "host": "127.0.0.1",
        "port": port,
        "workers": [{"url": stub_url, "model_name": "bench"}],
        "db_path": str(folder / "traces.db"),
        "sync_traces": True,
        "log_level": "WARNING",
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    return Launch(
        [bin / "rllm-model-gateway", "--config", file],
        health="/health",
        session_path="/sessions/{session}/v1/chat/completions",
    )


def _metaclaw(bin: Path, folder: Path, stub_url: str, port: int) -> Launch:
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
        [bin / "metaclaw", "start", "--mode", "skills_only", "--port", str(port)], health="/healthz"
    )


PEERS = [
    Peer(
        "litellm",
        "LiteLLM proxy 1.108.4",
        # It wants a certifi that the registry may not have yet.
        steps=[["--no-deps", "litellm==1.108.4"]],
        extras_of=("litellm", "proxy", "certifi==2026.10.18"),
        launch=_litellm,
    ),
    Peer("rllm", "rLLM gateway 0.1.0", steps=[["rllm-model-gateway==0.1.0"]], launch=_rllm),
    Peer(
        "metaclaw",
        "MetaClaw 0.4.1.2",
        steps=[["torch==2.13.0"], ["aiming-metaclaw[evolve]==0.4.1.2"]],
        launch=_metaclaw,
    ),
]
