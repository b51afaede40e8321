"""A gate process that is killed in every stage of a candidate.

The gate, with the scripted engine, runs in a forked process. A stage check keeps versions in the stages
`shadow` and `canary` for a while, and a promoted version is rolled back to the base model after a while, so
that the next candidate can be better again. Each third version is worse and must be rejected.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sqlite3
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instar.config import RunConfig
from instar.engines.scripted import ScriptedEngine
from instar.live.base import StageOutcome
from instar.live.sanity import load_sanity_items
from instar.record.base import Renderer
from instar.store.sqlite import SqliteStore
from instar.types import PolicyStage
from tests.unit.data.builders import RUN, put_test_run
from tests.unit.data.test_live import POLICY
from tests.unit.live import harness
from tests.unit.live.prompts import MARKER

LEDGER_ENV = "INSTAR_TEST_LEDGER"
STATES = ("candidate", "rejected", "shadow", "canary", "promoted", "rolled back")
PROMPTS = 40
STAGE_CHECKS = 3
"""The stage check makes a version wait this many times."""
ROLLBACK_DELAY_SECONDS = 0.2
POLL_SECONDS = 0.02
STATE_TIMEOUT_SECONDS = 60.0
MAX_KILL_DELAY_SECONDS = 0.15


def is_worse(version: int) -> bool:
    return version % 3 == 0 and version > 0


def reply(prompt: str, seed: int | None, version: int) -> str:
    text = re.findall(r"user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)[-1]
    with open(os.environ[LEDGER_ENV], "a") as ledger:  # noqa: PTH123 - shorter than Path
        ledger.write(f"{version}\t{text}\n")
    if MARKER not in prompt:
        return "you do it like everybody else"
    return "no" if version == 0 and (seed or 0) % 3 else "ok" if is_worse(version) else "please"


@dataclass
class GateTorture:
    """A store with held-out prompts, in which gates are killed until ``kill_count`` is reached."""

    folder: Path
    config: RunConfig
    renderer: Renderer
    kill_count: int
    seed: int
    kills: Counter[str] = field(default_factory=Counter[str])
    """The number of kills by the state in which the version was."""

    def run(self) -> None:
        """Kill gates, and check the invariants after every kill."""
        rng = random.Random(self.seed)
        asyncio.run(self._fill())
        while self.kills.total() < self.kill_count:
            if self.read_state() in ("none", "rejected", "rolled back"):
                asyncio.run(self._add_candidate())
            evaluated = self._read_items()
            start, ledger = self.read_state(), self.folder / f"ledger-{self.kills.total()}"
            process = self._fork(ledger)
            deadline = time.monotonic() + STATE_TIMEOUT_SECONDS
            # In the stage `candidate`, some items are evaluated before the kill; else the stage must change.
            while self.read_state() == start and not (start == "candidate" and rng.random() < 0.01):
                assert time.monotonic() < deadline, f"the gate does not leave the state {start}"
                time.sleep(POLL_SECONDS)
            time.sleep(rng.uniform(0, MAX_KILL_DELAY_SECONDS))
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            self.kills[self.read_state()] += 1
            self._check_not_evaluated_again(evaluated, ledger)
            self._check_served_versions()

    def query(self, sql: str, *values: object) -> list[Any]:
        store = sqlite3.connect(f"file:{self.folder / 'store.db'}?mode=ro", uri=True, timeout=10)
        try:
            return store.execute(sql, values).fetchall()
        finally:
            store.close()

    def read_state(self) -> str:
        """Return the state of the newest version."""
        rows = self.query("SELECT stage, reason FROM policies ORDER BY version DESC LIMIT 1")
        if not rows:
            return "none"
        stage, reason = rows[0]
        if stage == PolicyStage.SERVING:
            return "rolled back" if reason else "promoted"
        return stage

    # --- processes ---------------------------------------------------------------------------------

    async def _fill(self) -> None:
        store = SqliteStore(self.folder / "store.db")
        await put_test_run(store)
        await harness.add_sessions(store, self.renderer, 0, PROMPTS)
        await store.close()

    async def _add_candidate(self) -> None:
        store = SqliteStore(self.folder / "store.db")
        gate_harness = harness.GateHarness(self.config, store, self._create_engine(), self.renderer)
        (newest,) = self.query("SELECT COALESCE(MAX(version), 0) FROM policies")[0]
        await gate_harness.add_candidate(newest + 1, parent=(await store.latest_policy(POLICY)).version)
        await store.close()

    def _create_engine(self) -> ScriptedEngine:
        return ScriptedEngine(self.config.model, self.config.engine)  # pyright: ignore[reportArgumentType]

    def _fork(self, ledger: Path) -> int:
        ledger.touch()
        if process := os.fork():
            return process
        try:
            os.environ[LEDGER_ENV] = str(ledger)
            asyncio.run(self._run_gate())
        finally:
            os._exit(1)

    async def _run_gate(self) -> None:
        checks: Counter[PolicyStage] = Counter()

        async def check_stage(policy_id: str, version: int, stage: PolicyStage) -> StageOutcome:
            checks[stage] += 1
            return StageOutcome("wait" if checks[stage] % (STAGE_CHECKS + 1) else "advance")

        store = SqliteStore(self.folder / "store.db")
        gate_harness = harness.GateHarness(self.config, store, self._create_engine(), self.renderer)
        gate = gate_harness.create_gate(check_stage)
        while True:
            if await gate.advance():
                continue
            await asyncio.sleep(POLL_SECONDS)
            if self.read_state() == "promoted":
                await asyncio.sleep(ROLLBACK_DELAY_SECONDS)
                await store.roll_back(POLICY, RUN, 0)

    # --- invariants --------------------------------------------------------------------------------

    def _read_items(self) -> set[tuple[int, str, str]]:
        return set(self.query("SELECT version, set_name, item_key FROM evaluation_items"))

    def _check_not_evaluated_again(self, evaluated: set[tuple[int, str, str]], ledger: Path) -> None:
        """Check that no item was sampled for a candidate whose scores for it were stored at the start."""
        texts = {item.key: item.messages[0]["content"] for item in load_sanity_items()}
        for session_id, messages in self.query("SELECT session_id, messages FROM calls"):
            with suppress(IndexError):
                texts[session_id] = re.findall(rf"{MARKER} \d+", messages)[0]
        sampled = Counter(tuple(line.split("\t")) for line in ledger.read_text().splitlines())
        again = [item for item in evaluated if sampled[str(item[0]), texts[item[2]]]]
        assert not again, f"evaluated again: {again[:3]}"
        (count, distinct) = self.query(
            "SELECT COUNT(*), COUNT(DISTINCT version || set_name || item_key) FROM evaluation_items"
        )[0]
        assert count == distinct

    def _check_served_versions(self) -> None:
        """Check that every version that was ever served passed the gate, or is a rollback to the base."""
        passed = {row[0] for row in self.query("SELECT version FROM evaluations WHERE decision = 'promote'")}
        rows = self.query(
            "SELECT version, stage, artifact_kind FROM policies "
            "WHERE promoted_at IS NOT NULL OR stage IN ('shadow', 'canary', 'serving')"
        )
        for version, stage, kind in rows:
            assert version in passed or kind == "base", f"version {version} is {stage} without an evaluation"
            assert not is_worse(version) or kind == "base", f"version {version} is worse, but {stage}"
        numbers = [row[0] for row in self.query("SELECT number FROM evaluations ORDER BY number")]
        assert numbers == list(range(1, len(numbers) + 1)), "the error budget was spent twice"
