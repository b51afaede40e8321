"""Tests that a run in sync mode with the local engine is repeated bit for bit, also after kills.

The agents' calls arrive in a different order in every run, so the engine processes them in different batches.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from instar.agents.openai_agent import OpenAIAgent
from instar.rewards.base import Transcript
from instar.rollout.base import AgentSession
from instar.types import Json
from tests.tiny import make_tiny_model
from tests.torture.run_process import Fingerprint, RunProcess, StoredRun, make_config

STEPS = 4


class TalkingAgent(OpenAIAgent):
    """An agent that sends two messages."""

    async def __call__(self, task: Json, session: AgentSession) -> None:
        messages: list[Any] = [{"role": "user", "content": f"Tell me about {task['number']}. " * 3}]
        for max_tokens in (12, 6):
            reply = await self.complete(session, messages, max_tokens=max_tokens)
            messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": "Go on."}]


talk = TalkingAgent()


def score_letters(task: Json, transcript: Transcript) -> float:
    """Return the fraction of ASCII letters, which differs between the replies of a random model."""
    text = transcript.final_text
    return sum(char.isascii() and char.isalpha() for char in text) / max(1, len(text))


def make_run(folder: Path, model: Path) -> RunProcess:
    folder.mkdir()
    config = make_config(folder, model, steps=STEPS)
    config["model"]["dtype"] = "bf16"
    config["engine"] = {"type": "local", "threads": 1}
    config["rollout"]["agent"] = {"type": "function", "function": f"{__name__}:talk"}
    config["reward"] = {"type": "rule", "function": f"{__name__}:score_letters"}
    return RunProcess(folder, config)


@pytest.mark.timeout(600)
def test_run_is_repeated_bit_for_bit_also_after_kills(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=64)
    fingerprints: list[Fingerprint] = []
    for name in ("first", "second"):
        run = make_run(tmp_path / name, model)
        run.start()
        run.finish(240)
        fingerprints.append(StoredRun(run.run_dir, STEPS).read_fingerprint())
    assert fingerprints[0].trained
    assert fingerprints[1].list_differences(fingerprints[0]) == []

    run = make_run(tmp_path / "killed", model)
    run.start()
    assert run.wait_until(lambda: run.count_committed_steps() >= 1), run.collect_logs()
    (engine_pid,) = [pid for pid, role in run.list_processes().items() if role == "engine"]
    os.kill(engine_pid, signal.SIGKILL)
    assert run.wait_until(lambda: run.count_committed_steps() >= 2), run.collect_logs()
    run.kill()
    run.start(resume=True)
    run.finish(240)
    assert StoredRun(run.run_dir, STEPS).read_fingerprint().list_differences(fingerprints[0]) == []
