"""How much of what agents do becomes exact training data: clients × dialects × model families.

    python bench/fidelity.py [--json] [--clients openai,langgraph,codex] [--families SmolLM2,Qwen3]

Every client holds conversations with tools through a live gateway, whose scripted engine writes in the model
family's own format by its real tokenizer: once in a session opened for it, and once as a live agent, whose
calls the gateway has to put together. Counted are

    linked        calls recorded in their conversation's session
    exact prefix  of the turns that extend their history, those whose prompt begins with the earlier prompt
                  and the tokens sampled for it. A turn that says otherwise what was said extends nothing
    trained       of the sampled tokens, those under the mask of a training sample

Python clients are installed once under .cache/clients, tokenizers under .cache/tokenizers; command-line
agents are measured where .cache/agents has them (`python -m tests.integration.agents.cli` gets them).
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

from fidelity_parts.families import FAMILIES, Family, NotAvailable
from fidelity_parts.gateway import RUN, running
from fidelity_parts.score import Score, score, total
from fidelity_parts.talks import Talk, hold_cli, hold_python
from rich.console import Console
from rich.table import Table

from instar.types import Channel
from tests.integration.agents.cli import AGENTS
from tests.integration.clients.accounts import Recorded, asking, recorded
from tests.integration.clients.roster import CLIENTS

console = Console(stderr=True)


@dataclass
class Row:
    client: str
    dialect: str
    family: str
    score: Score

    def facts(self) -> dict[str, object]:
        counts = {**asdict(self.score), "reasons": dict(self.score.reasons)}
        where = {"client": self.client, "dialect": self.dialect, "family": self.family}
        return {**where, **self.score.shares, "counts": counts}


def log(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)


async def measure(family: Family, names: Sequence[str], folder: Path) -> list[Row]:
    """All clients, one after the other, at one gateway."""
    script = f"fidelity_parts.script:{family.script}"
    async with running(family, script, folder / "store.db") as gateway:
        talks: list[Talk] = []
        for i, client in enumerate(client for client in CLIENTS if client.name in names):
            log(f"{family.name}: {client.name} {', '.join(client.ways)}")
            talks += await hold_python(gateway, client, 100 * (i + 1), folder)
        for agent in AGENTS.values():
            if agent.name in names:
                log(f"{family.name}: {agent.name}")
                talks += await hold_cli(gateway, agent, folder)
        found = await recorded(gateway.store, RUN)
        rows: dict[tuple[str, str], Row] = {}
        for talk in talks:
            where = talk.client, talk.dialect
            row = rows.setdefault(where, Row(*where, family.name, Score()))
            if talk.failed:
                row.score.reasons[f"did not work: {talk.failed}"] += 1
                continue
            own = asking([one for one in found if belongs(one, talk)], talk.asked, gateway.decode)
            row.score += score(
                own,
                session=talk.place.session,
                drops_reasoning=family.drops_reasoning,
                prompts=talk.dialect == "completions",
            )
        return list(rows.values())


def belongs(one: Recorded, talk: Talk) -> bool:
    """Whether a session may hold calls of the conversation: a live one by its key, opened ones all."""
    if talk.place.session:
        return one.session.channel is Channel.TRAIN
    return one.session.agent_id == talk.place.agent_id


def show(rows: Sequence[Row]) -> None:
    table = Table("client", "dialect", "family", "linked", "exact prefix", "trained", "turns", "why not 100%")
    for row in rows:
        shares = ["-" if share is None else f"{share:.1%}" for share in row.score.shares.values()]
        turns = f"{row.score.turns}" + (f" + {row.score.rewritten} rewritten" if row.score.rewritten else "")
        table.add_row(row.client, row.dialect, row.family, *shares, turns, "; ".join(row.score.reasons))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def chosen(names: str | None, known: Sequence[str]) -> list[str]:
    wanted = names.split(",") if names else list(known)
    if unknown := set(wanted) - set(known):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with the figures as one line of JSON")
    parser.add_argument("--clients", help="some of them, with commas between")
    parser.add_argument("--families", help="some of them, with commas between")
    options = parser.parse_args()
    at_hand = [agent.name for agent in AGENTS.values() if agent.folder.exists()]
    names = chosen(options.clients, [*dict.fromkeys(client.name for client in CLIENTS), *at_hand])
    families = chosen(options.families, [family.name for family in FAMILIES])
    rows: list[Row] = []
    for family in FAMILIES:
        if family.name in families:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    rows += asyncio.run(measure(family, names, Path(folder)))
                except NotAvailable as why:
                    log(f"{family.name} is left out: {why}")
    show(rows)
    if options.json:
        overall = total(row.score for row in rows).shares
        print(json.dumps({**overall, "rows": [row.facts() for row in rows]}))
    if any(row.score.unexplained for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
