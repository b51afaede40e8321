"""Tests for complete runs with two real vLLM engines."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from instar.cluster.layout import RunFolder
from instar.store.factory import open_store
from instar.types import Call, Floats
from tests.integration.backends.environments import get_interpreter
from tests.integration.vllm.parity import LOGPROB_TOLERANCE
from tests.integration.vllm.servers import ENGINE_PROCESS_NAME, make_vllm_model
from tests.torture.run_process import RunProcess

pytestmark = pytest.mark.timeout(1300)
RUN_TIMEOUT_SECONDS = 600
AGENT_MODULE = "tests.integration.vllm.agent"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("model"))


def make_run_settings(
    folder: Path, model: Path, policy: str, *, max_tokens: int, **trainer_settings: Any
) -> dict[str, Any]:
    agent_args = {"ledger": str(folder / "ledger.txt"), "max_tokens": max_tokens}
    return {
        "name": "served",
        "dir": str(folder / "run"),
        "model": {"name": str(model), "dtype": "fp32", "device": "cpu", "max_context": 256},
        "engine": {
            "type": "vllm",
            "python": str(get_interpreter("vllm")),
            "policy": policy,
            "count": 2,
            "kv_gib": 0.1,
        },
        "backend": {"type": "local", "threads": 1, "lora": {"rank": 4}},
        "trainer": {
            "groups_per_step": 2,
            "adam": {"lr": 1e-2},
            "warmup_steps": 0,
            "keep_checkpoints": 20,
            "tensorboard": False,
            **trainer_settings,
        },
        "rollout": {
            "tasks": {"type": "python", "function": f"{AGENT_MODULE}:list_tasks"},
            "agent": {"type": "function", "function": f"{AGENT_MODULE}:run_agent", "args": agent_args},
            "group_size": 4,
            "timeout": 300,
            "retries": 6,
        },
        "reward": {"type": "agent"},
    }


class PublishedPolicies:
    """Computes logprobs under the published versions with transformers and peft."""

    def __init__(self, model: Path, adapters: dict[int, str]) -> None:
        logging.disable_progress_bar()
        self._model, self._adapters = model, adapters
        self._loaded: dict[int, Any] = {}

    def compute_logprobs(self, version: int, ids: Floats) -> Floats:
        if version not in self._loaded:
            model: Any = AutoModelForCausalLM.from_pretrained(self._model)
            if version:
                model = PeftModel.from_pretrained(model, self._adapters[version])
            self._loaded[version] = model
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            logits = self._loaded[version](tokens[None]).logits[0, :-1]
        return logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy()


async def read_calls_and_adapters(run: RunProcess) -> tuple[list[Call], dict[int, str]]:
    """Return all calls, and the adapter folder of each published version."""
    store = open_store(RunFolder(run.run_dir).read_config(), read_only=True)
    try:
        adapters = {
            policy.version: policy.artifact.path for policy, _ in await store.published_policies("served")
        }
        session_ids = [row[0] for row in run.query("SELECT session_id FROM sessions")]
        return [call for session_id in session_ids for call in await store.calls(session_id)], adapters
    finally:
        await store.close()


async def check_every_token(run: RunProcess, model: Path) -> set[int]:
    """Assert that every token's logprob matches its policy version, and return all versions."""
    calls, adapters = await read_calls_and_adapters(run)
    policies = PublishedPolicies(model, adapters)
    versions: set[int] = set()
    for call in calls:
        for version in set(call.versions.tolist()):
            expected = policies.compute_logprobs(version, call.sequence)[len(call.prompt_ids) - 1 :]
            mask = call.versions == version
            np.testing.assert_allclose(call.logprobs[mask], expected[mask], atol=LOGPROB_TOLERANCE)
            versions.add(version)
    return versions


def find_server_pids(run: RunProcess) -> Iterator[int]:
    """Yield the ids of the vLLM processes that log to the folder of this run."""
    for entry in Path("/proc").iterdir():
        try:
            name = (entry / "comm").read_text() if entry.name.isdigit() else ""
            output = str((entry / "fd" / "1").readlink()) if name.startswith(ENGINE_PROCESS_NAME) else ""
        except OSError:
            continue  # the process has exited
        if str(run.run_dir) in output:
            yield int(entry.name)


@contextmanager
def run_in_background(run: RunProcess) -> Iterator[None]:
    """Start the run, and kill it on exit if it has not finished."""
    run.start()
    try:
        yield
    finally:
        if not run.has_exited():
            run.kill()


async def test_run_with_merged_weights_survives_a_killed_server(model: Path, tmp_path: Path) -> None:
    # With max_staleness 3, sessions of the last step start under version 2 or later, so at least two versions
    # are sampled, however slow the servers are.
    config = make_run_settings(tmp_path, model, "merged", max_tokens=160, steps=6, max_staleness=3)
    run = RunProcess(tmp_path, config)
    with run_in_background(run):
        assert run.wait_until(lambda: run.count_committed_steps() >= 2, RUN_TIMEOUT_SECONDS), (
            run.collect_logs()
        )
        killed_pid, _ = sorted(find_server_pids(run))
        os.kill(killed_pid, signal.SIGKILL)
        run.finish(RUN_TIMEOUT_SECONDS)
    run.assert_consistent()
    logs = run.run_dir / "logs"
    role_logs = [(logs / f"engine-{index}.log").read_text() for index in range(2)]
    assert sum("restarting it" in text for text in role_logs) == 1
    assert all((logs / f"engine-{index}-vllm.log").stat().st_size for index in range(2))
    assert "engine" not in run.output.read_text(), "only the server may be restarted, not its engine role"
    versions = await check_every_token(run, model)
    assert len(versions) >= 2
    assert not list(find_server_pids(run)), "the servers must stop with the run"


async def test_run_with_adapters_records_exact_logprobs(model: Path, tmp_path: Path) -> None:
    settings = make_run_settings(tmp_path, model, "adapter", max_tokens=24, steps=3, mode="sync")
    settings["engine"]["max_adapters"] = 1
    run = RunProcess(tmp_path, settings)
    with run_in_background(run):
        run.finish(RUN_TIMEOUT_SECONDS)
    run.assert_consistent()
    assert await check_every_token(run, model) == {0, 1, 2}
    logs = [(run.run_dir / "logs" / f"engine-{index}-vllm.log").read_text() for index in range(2)]
    assert all("Removed LoRA adapter: name 'served-v1-" in text for text in logs)
    assert not list(find_server_pids(run))
