"""The unmodified npm command-line agents under test: installation, settings and non-interactive runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cached_folders import create_folder_once

CACHE = Path(__file__).parents[3] / ".cache" / "agents"
NODE_VERSION = "24.21.0"
"""OpenClaw requires at least 24.16. The other agents also run with this version."""
INSTALL_TIMEOUT_SECONDS = 540
RUN_TIMEOUT_SECONDS = 120


class AgentInstallError(Exception):
    """An agent could not be installed."""


@dataclass(frozen=True)
class ServerTarget:
    """The server that an agent uses."""

    url: str
    """The base URL without ``/v1``."""
    key: str
    model: str = "instar"


@dataclass(frozen=True)
class AgentCommand:
    """A command and the environment variables that it needs."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class CliAgent:
    name: str
    package: str
    version: str
    prepare: Callable[[Path, ServerTarget, str], AgentCommand]
    """Returns the command for a home folder, server and task. May write settings to the home folder."""

    @property
    def folder(self) -> Path:
        return CACHE / f"{self.name}-{self.version}"

    def install(self) -> None:
        install("node", "node", NODE_VERSION)
        install(self.name, self.package, self.version)

    def run(self, home: Path, work_folder: Path, target: ServerTarget, task: str) -> str:
        """Run the agent and return its output.

        Raises CalledProcessError or TimeoutExpired, both with the output.
        """
        home.mkdir(parents=True, exist_ok=True)
        command = self.prepare(home, target, task)
        completed = subprocess.run(
            [str(self.folder / "node_modules" / ".bin" / command.argv[0]), *command.argv[1:]],
            cwd=work_folder,
            env=_make_environment(home, command.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_TIMEOUT_SECONDS,
        )
        if completed.returncode:
            raise subprocess.CalledProcessError(completed.returncode, command.argv, completed.stdout)
        return completed.stdout


def install(name: str, package: str, version: str) -> None:
    """Install the package into the cache unless it is already there."""

    def create(folder: Path) -> None:
        npm = shutil.which("npm")
        if npm is None:
            raise AgentInstallError("npm is not installed")
        folder.mkdir()
        command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), f"{package}@{version}"]
        env = {**os.environ, "PATH": _make_search_path()}
        try:
            subprocess.run(
                command, env=env, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_SECONDS
            )
        except subprocess.CalledProcessError as error:
            raise AgentInstallError(
                f"npm could not install {package}@{version}: {error.stderr[-500:]}"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise AgentInstallError(
                f"npm did not install {package}@{version} within {INSTALL_TIMEOUT_SECONDS} s"
            ) from error

    create_folder_once(CACHE / f"{name}-{version}", create)


def _make_search_path() -> str:
    """Return PATH with the cached Node before the system's Node."""
    return f"{CACHE / f'node-{NODE_VERSION}' / 'node_modules' / 'node' / 'bin'}:{os.environ['PATH']}"


def _make_environment(home: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that inherits only PATH from this process."""
    return {
        "HOME": str(home),
        "PATH": _make_search_path(),
        "TMPDIR": str(home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
        **variables,
    }


def _prepare_claude_code(home: Path, target: ServerTarget, task: str) -> AgentCommand:
    return AgentCommand(
        ["claude", "-p", task, "--dangerously-skip-permissions", "--model", target.model],
        {
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_API_KEY": target.key,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        },
    )


def _prepare_codex(home: Path, target: ServerTarget, task: str) -> AgentCommand:
    settings_path = home / ".codex" / "config.toml"
    settings_path.parent.mkdir(exist_ok=True)
    settings_path.write_text(
        f"""
model = "{target.model}"
model_provider = "instar"

[model_providers.instar]
name = "Instar"
base_url = "{target.url}/v1"
env_key = "INSTAR_KEY"
wire_api = "responses"
"""
    )
    return AgentCommand(
        ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task],
        {"INSTAR_KEY": target.key},
    )


def _prepare_qwen_code(home: Path, target: ServerTarget, task: str) -> AgentCommand:
    return AgentCommand(
        ["qwen", "-y", "--auth-type", "openai", "-p", task],
        {
            "OPENAI_BASE_URL": f"{target.url}/v1",
            "OPENAI_API_KEY": target.key,
            "OPENAI_MODEL": target.model,
            "QWEN_TELEMETRY_ENABLED": "0",
        },
    )


def _prepare_opencode(home: Path, target: ServerTarget, task: str) -> AgentCommand:
    settings_path = home / ".config" / "opencode" / "opencode.json"
    settings_path.parent.mkdir(parents=True, exist_ok=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Instar",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
        "models": {target.model: {"name": target.model, "limit": {"context": 200000, "output": 8192}}},
    }
    settings_path.write_text(
        json.dumps(
            {
                "provider": {"instar": provider},
                "model": f"instar/{target.model}",
                "autoupdate": False,
                "share": "disabled",
            }
        )
    )
    return AgentCommand(["opencode", "run", task], {"OPENCODE_DISABLE_MODELS_FETCH": "1"})


def prepare_openclaw_with_default_tools(home: Path, target: ServerTarget, task: str) -> AgentCommand:
    """Write settings that leave OpenClaw's default tools enabled, and return the command.

    With these tools, OpenClaw ends each request with a note about running programs and sub-agents, and omits
    the note from the next request. So no request extends an earlier one.
    """
    settings_path = home / ".openclaw" / "openclaw.json"
    settings_path.parent.mkdir(exist_ok=True)
    model = {"id": target.model, "name": target.model, "contextWindow": 200000, "maxTokens": 8192}
    model["compat"] = {"sendSessionAffinityHeaders": True, "supportsPromptCacheKey": True}
    settings_path.write_text(
        json.dumps(
            {
                "models": {
                    "providers": {
                        "instar": {
                            "baseUrl": f"{target.url}/v1",
                            "apiKey": target.key,
                            "api": "openai-completions",
                            "models": [model],
                        }
                    }
                },
                "agents": {"defaults": {"model": {"primary": f"instar/{target.model}"}}},
            }
        )
    )
    return AgentCommand(["openclaw", "agent", "--local", "--session-id", "tests", "--message", task])


def _prepare_openclaw(home: Path, target: ServerTarget, task: str) -> AgentCommand:
    command = prepare_openclaw_with_default_tools(home, target, task)
    settings_path = home / ".openclaw" / "openclaw.json"
    denied_tools = {"tools": {"deny": ["process", "sessions_spawn"]}}
    settings_path.write_text(json.dumps({**json.loads(settings_path.read_text()), **denied_tools}))
    return command


AGENTS = {
    agent.name: agent
    for agent in (
        CliAgent("claude-code", "@anthropic-ai/claude-code", "2.1.325", _prepare_claude_code),
        CliAgent("codex", "@openai/codex", "0.166.0", _prepare_codex),
        CliAgent("qwen-code", "@qwen-code/qwen-code", "0.24.4", _prepare_qwen_code),
        CliAgent("opencode", "opencode-ai", "1.18.33", _prepare_opencode),
        CliAgent("openclaw", "openclaw", "2026.9.6", _prepare_openclaw),
    )
}

if __name__ == "__main__":
    for name in sys.argv[1:] or AGENTS:
        AGENTS[name].install()
