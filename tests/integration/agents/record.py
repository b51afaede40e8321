"""Record the traffic of real agents: ``python -m tests.integration.agents.record [agent[-scenario] ...]``.

Each agent runs against a server that follows a scenario. Its requests and the responses are written to
``tests/unit/record/fixtures/traffic/<agent>-<scenario>.json.gz`` as a list of
``{path, headers, body, reply}``, without the paths, names and ids of this machine. Long texts are truncated,
with a digest at the end so that different texts stay different.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import platform
import re
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from instar.gateway.serve import bind, serve
from tests.integration.agents.agent_tools import EDITED_TEXT, FILE_NAME, ORIGINAL_TEXT, make_task
from tests.integration.agents.capture import CapturedExchange, CaptureServer
from tests.integration.agents.cli import AGENTS, CliAgent, ServerTarget, prepare_openclaw_with_default_tools
from tests.integration.agents.scenarios import SCENARIOS, SUMMARY

FIXTURES = Path(__file__).parents[2] / "unit" / "record" / "fixtures" / "traffic"
MAX_TEXT_LENGTH = 300
"""Longer texts, except JSON objects, are truncated to half of this length, and a digest is appended."""
KEPT_HEADER_PATTERN = re.compile(
    r"session|thread|agent|window|affinity|request-id|retry|idempotency|anthropic|metadata"
)
RECORDED_SCENARIOS = {
    "claude-code": ["edit", "retry", "compaction", "subagents"],
    "codex": ["edit", "retry", "compaction", "subagents"],
    "qwen-code": ["edit", "retry", "compaction", "subagents"],
    "opencode": ["edit", "retry", "compaction", "subagents"],
    "openclaw": ["edit", "retry", "rewriting"],
}


async def run_scenario(agent: CliAgent, scenario: str, folder: Path) -> list[CapturedExchange]:
    """Run the agent in the scenario and return its traffic.

    Raises RuntimeError if the agent does not complete its task, or if it does not compact its context in the
    `compaction` scenario.
    """
    work_folder, home = folder / "project", folder / "home"
    work_folder.mkdir()
    path = work_folder / FILE_NAME
    path.write_text(ORIGINAL_TEXT)
    capture = CaptureServer(SCENARIOS[scenario](agent.name, str(path)).make_script())
    listener = bind("127.0.0.1", 0)
    stop = asyncio.Event()
    server_task = asyncio.create_task(serve(capture.create_app(), listener, stop=stop, grace=1))
    target = ServerTarget(f"http://127.0.0.1:{listener.getsockname()[1]}", "sk-recorded")
    try:
        output = await asyncio.to_thread(agent.run, home, work_folder, target, make_task(str(path)))
    finally:
        stop.set()
        await server_task
    if path.read_text() != EDITED_TEXT:
        raise RuntimeError(
            f"{agent.name} did not complete its task in the scenario {scenario}: {output[-2000:]}"
        )
    if scenario == "compaction" and not any(
        SUMMARY in json.dumps(exchange.reply) for exchange in capture.exchanges
    ):
        raise RuntimeError(f"{agent.name} did not compact its context: {output[-2000:]}")
    return capture.exchanges


def anonymize(exchanges: list[CapturedExchange], folder: Path) -> list[dict[str, Any]]:
    """Return the traffic without details of this machine, and with long texts truncated.

    Only headers about sessions, agents, requests and retries are kept.
    """
    replacements = {
        str(folder): "/home/user",
        platform.release(): "6.1.0",
        f"host={socket.gethostname()}": "host=host",
    }
    return [
        {
            "path": exchange.path,
            "headers": {
                key: _anonymize_value(value, replacements)
                for key, value in exchange.headers.items()
                if KEPT_HEADER_PATTERN.search(key)
            },
            "body": _anonymize_value(exchange.body, replacements),
            "reply": _anonymize_value(exchange.reply, replacements),
        }
        for exchange in exchanges
    ]


def _anonymize_value(value: Any, replacements: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _anonymize_value(inner, replacements) for key, inner in value.items()}
    if isinstance(value, list):
        return [_anonymize_value(inner, replacements) for inner in value]
    if not isinstance(value, str):
        return value
    for text, replacement in replacements.items():
        value = value.replace(text, replacement)
    value = re.sub(r"(device_id\W+|installation_id\W+)[0-9a-f-]{32,}", r"\g<1>0", value)
    if len(value) <= MAX_TEXT_LENGTH or value.lstrip().startswith("{"):
        return value
    digest = hashlib.blake2b(value.encode(), digest_size=6).hexdigest()
    return f"{value[: MAX_TEXT_LENGTH // 2]}… [{len(value)} characters, {digest}]"


def record(agent: CliAgent, scenario: str) -> Path:
    agent.install()
    if scenario == "rewriting":  # with its default tools, OpenClaw rewrites its history
        agent = replace(agent, prepare=prepare_openclaw_with_default_tools)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        traffic = anonymize(asyncio.run(run_scenario(agent, scenario, folder)), folder)
    FIXTURES.mkdir(parents=True, exist_ok=True)
    fixture = FIXTURES / f"{agent.name}-{scenario}.json.gz"
    text = json.dumps(traffic, ensure_ascii=False)
    fixture.write_bytes(gzip.compress(text.encode(), mtime=0))
    return fixture


def main(selected: list[str]) -> None:
    for name, scenarios in RECORDED_SCENARIOS.items():
        for scenario in scenarios:
            if not selected or f"{name}-{scenario}" in selected or name in selected:
                fixture = record(AGENTS[name], scenario)
                print(f"{fixture.name}: {fixture.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
