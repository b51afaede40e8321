"""Measure how much agent traffic becomes exact training data, by client, dialect and model family.

    python bench/fidelity.py [--json] [--clients openai,langgraph,codex] [--families SmolLM2,Qwen3]

Every client holds conversations with tool calls through a running gateway. The gateway's scripted engine
replies in the format of the model family and uses its real tokenizer. Each conversation is held twice: in a
session that was opened for it, and by a live agent whose calls the gateway has to group into sessions. The
metrics are the fractions of

    linked        calls that were recorded in their conversation's session
    exact prefix  turns whose prompt starts with the previous prompt and the tokens sampled for it. Turns that
                  change earlier messages are not counted
    trained       sampled tokens that the mask of a training sample includes

The exit status is 1 if a fraction is below 1 for an unknown reason.

Python clients are installed once under .cache/clients, tokenizers under .cache/tokenizers. Command-line
agents are measured if they are installed in .cache/agents (run `python -m tests.integration.agents.cli` to
install them).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fidelity_parts.conversations import ClientConversation, run_cli_agent, run_python_client
from fidelity_parts.families import FAMILIES, Family, TokenizerUnavailable
from fidelity_parts.gateway import RUN, run_gateway
from fidelity_parts.score import Score, add_scores, score_conversation
from rich.console import Console
from rich.table import Table

from instar.types import Channel
from tests.integration.agents.cli import AGENTS
from tests.integration.clients.recorded_sessions import (
    RecordedSession,
    load_recorded_sessions,
    select_calls_with_question,
)
from tests.integration.clients.supported_clients import CLIENTS

console = Console(stderr=True)


@dataclass
class Row:
    client: str
    dialect: str
    family: str
    score: Score

    def to_json(self) -> dict[str, object]:
        counts = {**asdict(self.score), "reasons": dict(self.score.reasons)}
        key = {"client": self.client, "dialect": self.dialect, "family": self.family}
        return {**key, **self.score.fractions, "counts": counts}


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


async def measure(family: Family, client_names: Sequence[str], folder: Path) -> list[Row]:
    """Measure the named clients, one after another, with one gateway."""
    script = f"fidelity_parts.script:{family.script}"
    async with run_gateway(family, script, folder / "store.db") as gateway:
        conversations: list[ClientConversation] = []
        for i, client in enumerate(client for client in CLIENTS if client.name in client_names):
            log(f"{family.name}: {client.name} {', '.join(client.variants)}")
            conversations += await run_python_client(gateway, client, 100 * (i + 1), folder)
        for agent in AGENTS.values():
            if agent.name in client_names:
                log(f"{family.name}: {agent.name}")
                conversations += await run_cli_agent(gateway, agent, folder)
        all_sessions = await load_recorded_sessions(gateway.store, RUN)
        rows: dict[tuple[str, str], Row] = {}
        for conversation in conversations:
            key = conversation.client, conversation.dialect
            row = rows.setdefault(key, Row(*key, family.name, Score()))
            if conversation.error:
                row.score.reasons[f"the client failed: {conversation.error}"] += 1
                continue
            candidates = [session for session in all_sessions if may_contain_calls(session, conversation)]
            sessions = select_calls_with_question(candidates, conversation.prompt_marker, gateway.decode)
            row.score += score_conversation(
                sessions,
                session_id=conversation.endpoint.session_id,
                drops_reasoning=family.drops_reasoning,
                is_text_completion=conversation.dialect == "completions",
            )
        return list(rows.values())


def may_contain_calls(candidate: RecordedSession, conversation: ClientConversation) -> bool:
    """True if the session may contain calls of this conversation.

    A live agent's calls are in sessions with its agent id. All other calls are in sessions that were opened
    explicitly.
    """
    if conversation.endpoint.session_id:
        return candidate.session.channel is Channel.TRAIN
    return candidate.session.agent_id == conversation.endpoint.agent_id


def show(rows: Sequence[Row]) -> None:
    table = Table(
        "client", "dialect", "family", "linked", "exact prefix", "trained", "turns", "reasons below 100%"
    )
    for row in rows:
        fractions = ["-" if value is None else f"{value:.1%}" for value in row.score.fractions.values()]
        turns = f"{row.score.turns}" + (f" + {row.score.rewritten} rewritten" if row.score.rewritten else "")
        table.add_row(row.client, row.dialect, row.family, *fractions, turns, "; ".join(row.score.reasons))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def parse_names(option: str, names: str | None, available: Sequence[str]) -> list[str]:
    selected = names.split(",") if names else list(available)
    if unknown := set(selected) - set(available):
        raise SystemExit(f"Unknown {option}: {', '.join(sorted(unknown))}. Available: {', '.join(available)}")
    return selected


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the metrics as one JSON line at the end")
    parser.add_argument("--clients", help="comma-separated clients to measure (default: all)")
    parser.add_argument("--families", help="comma-separated model families (default: all)")
    options = parser.parse_args()
    installed_agents = [agent.name for agent in AGENTS.values() if agent.folder.exists()]
    client_names = parse_names(
        "clients", options.clients, [*dict.fromkeys(client.name for client in CLIENTS), *installed_agents]
    )
    family_names = parse_names("families", options.families, [family.name for family in FAMILIES])
    rows: list[Row] = []
    for family in FAMILIES:
        if family.name in family_names:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    rows += asyncio.run(measure(family, client_names, Path(folder)))
                except TokenizerUnavailable as error:
                    log(f"skipping {family.name}: {error}")
    show(rows)
    if options.json:
        overall = add_scores(row.score for row in rows).fractions
        print(json.dumps({**overall, "rows": [row.to_json() for row in rows]}))
    if any(row.score.has_unexplained for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
