"""Tests for training on imported runs and on datasets."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from instar.backends.local.backend import LocalBackend
from instar.backends.local.state import hash_adapter
from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.data.batcher import Batcher, StepBatch
from instar.store.factory import open_store
from tests.tiny import make_tiny_model
from tests.torture.run_process import ROOT, RunProcess, StoredRun, make_config

STEPS = 2
UNUSED_EPOCH = 1
"""An epoch in which the run has claimed nothing."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=2048)


def make_settings(folder: Path, model: Path, name: str, **overrides: Any) -> dict[str, Any]:
    """Return the settings of a run in ``folder / "runs"``."""
    config = make_config(folder, model, steps=STEPS)
    return {**config, "name": name, "dir": str(folder / "runs" / name), **overrides}


def run_to_completion(folder: Path, config: dict[str, Any]) -> RunProcess:
    run_folder = folder / config["name"]
    run_folder.mkdir()
    run = RunProcess(run_folder, config)
    run.start()
    run.finish()
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("datasets")


@pytest.fixture(scope="module")
def original(folder: Path, model: Path) -> RunProcess:
    return run_to_completion(folder, make_settings(folder, model, "original"))


def run_cli(folder: Path, *arguments: object) -> Any:
    command = [sys.executable, "-m", "instar.cli.main", *map(str, arguments), "--json"]
    completed = subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


async def train_on_store(config: RunConfig) -> list[tuple[StepBatch, str]]:
    """Train on every batch in the store, and return the batches and a hash of the weights after each."""
    store = open_store(config)
    batcher = Batcher(store, config.name, config)
    backend = LocalBackend(config.model, config.backend, seed=config.seed)  # type: ignore[arg-type]
    await backend.start()
    results: list[tuple[StepBatch, str]] = []
    step = 10 * STEPS  # the store already has the first steps
    while batch := await batcher.next_batch(step, UNUSED_EPOCH, 1, is_finished=lambda: True):
        await store.claim_step(config.name, step, batch.claims)
        await backend.forward_backward(batch.samples, config.trainer.loss)
        await backend.optim_step(config.trainer.adam)
        artifact = await backend.publish(config.run_dir / "retrained" / str(step))
        results.append((batch, hash_adapter(Path(artifact.path))))
        step += 1
    await backend.close()
    await store.close()
    return results


@pytest.mark.timeout(300)
@pytest.mark.parametrize("format", ["jsonl", "parquet", "hf"])
def test_imported_run_yields_the_same_batches_and_weights_as_the_original(
    original: RunProcess, folder: Path, format: str
) -> None:
    export_dir, imported_dir = folder / f"out-{format}", folder / format / "original"
    exported = run_cli(folder, "sessions", "export", original.run_dir, "--to", export_dir, "--format", format)
    assert exported["counts"]["sessions"] == STEPS * 2 * 4
    run_cli(folder, "sessions", "import", export_dir, "--into", imported_dir)
    config = RunFolder(original.run_dir).read_config()
    # The data was sampled by versions 0 and 1, and none of it may be stale at version 1.
    trainer = config.trainer.model_copy(update={"mode": "async", "max_staleness": 1})
    config = config.model_copy(update={"trainer": trainer})
    copy_dir = _copy_store(original.run_dir, folder / f"copy-{format}")
    original_results = asyncio.run(train_on_store(config.model_copy(update={"dir": copy_dir})))
    imported_results = asyncio.run(train_on_store(config.model_copy(update={"dir": imported_dir})))
    assert len(original_results) == len(imported_results) == STEPS
    for (expected, expected_hash), (actual, actual_hash) in zip(
        original_results, imported_results, strict=True
    ):
        assert expected.samples
        for expected_sample, actual_sample in zip(expected.samples, actual.samples, strict=True):
            assert (expected_sample.sample_key, expected_sample.session_id, expected_sample.spans) == (
                actual_sample.sample_key,
                actual_sample.session_id,
                actual_sample.spans,
            )
            for name in ("token_ids", "mask", "logprobs", "advantages", "versions"):
                assert getattr(expected_sample, name).tobytes() == getattr(actual_sample, name).tobytes(), (
                    name
                )
        assert expected.claims == actual.claims
        assert expected_hash == actual_hash


def _copy_store(run_dir: Path, target: Path) -> Path:
    """Copy the original's store, so that the claims of one test do not affect the next."""
    target.mkdir()
    for name in ("store.db", "store.db-wal", "store.db-shm"):
        if (run_dir / name).exists():
            (target / name).write_bytes((run_dir / name).read_bytes())
    return target


@pytest.mark.timeout(300)
def test_run_on_a_dataset_without_rollout_yields_the_original_weights(
    original: RunProcess, folder: Path, model: Path
) -> None:
    """No agent runs, so the weights depend only on the data."""
    run_cli(folder, "sessions", "export", original.run_dir, "--as", "golden")
    config = make_settings(folder, model, "alone", data="dataset:golden")
    del config["rollout"]
    run = run_to_completion(folder, config)
    assert run.query("SELECT DISTINCT role FROM endpoints WHERE role = 'rollout'") == []
    assert {epoch for (epoch,) in run.query("SELECT epoch FROM claims")} == {0}
    assert run.query("SELECT COUNT(*) FROM steps WHERE state = 'committed'") == [(STEPS,)]
    original_fingerprint, run_fingerprint = (
        StoredRun(stored.run_dir, STEPS).read_fingerprint() for stored in (original, run)
    )
    assert (run_fingerprint.adapter, run_fingerprint.optimizer) == (
        original_fingerprint.adapter,
        original_fingerprint.optimizer,
    )
    assert [(step, reward, advantage) for step, _, reward, advantage in run_fingerprint.trained] == [
        (step, reward, advantage) for step, _, reward, advantage in original_fingerprint.trained
    ]


@pytest.mark.timeout(300)
def test_run_on_rollouts_and_dataset_groups_respects_their_shares(
    original: RunProcess, folder: Path, model: Path
) -> None:
    run_cli(folder, "sessions", "export", original.run_dir, "--as", "half", "--format", "parquet")
    sources = [{"source": "rollout", "share": 0.5}, {"source": "dataset:half", "share": 0.5}]
    run = run_to_completion(folder, make_settings(folder, model, "both", data=sources))
    groups = run.query("SELECT DISTINCT step, group_id FROM claims ORDER BY step, group_id")
    assert [(step, group.split("/")[1]) for step, group in groups] == [
        (1, "data"),
        (1, "train"),
        (2, "data"),
        (2, "train"),
    ]
    assert run.query("SELECT COUNT(*) FROM groups WHERE channel = 'train'") == [(STEPS,)]
