"""Run, export, import, train: the same batches, and the same weights, bit for bit."""

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
from tests.torture.tortured import ROOT, Tortured, Trained, settings

STEPS = 2
AGAIN = 1
"""An epoch that no step of the run has claimed anything in."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=2048)


def configured(folder: Path, model: Path, name: str, **changes: Any) -> dict[str, Any]:
    """A run beside others in one folder."""
    config = settings(folder, model, steps=STEPS)
    return {**config, "name": name, "dir": str(folder / "runs" / name), **changes}


def start(folder: Path, config: dict[str, Any]) -> Tortured:
    place = folder / config["name"]
    place.mkdir()
    run = Tortured(place, config)
    run.start()
    run.finish()
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("datasets")


@pytest.fixture(scope="module")
def original(folder: Path, model: Path) -> Tortured:
    return start(folder, configured(folder, model, "original"))


def instar(folder: Path, *arguments: object) -> Any:
    command = [sys.executable, "-m", "instar.cli.main", *map(str, arguments), "--json"]
    done = subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def learn(config: RunConfig) -> list[tuple[StepBatch, str]]:
    """Every batch of the run's store, and the weights after each."""
    store = open_store(config)
    batcher = Batcher(store, config.name, config)
    backend = LocalBackend(config.model, config.backend, seed=config.seed)  # type: ignore[arg-type]
    await backend.start()
    learned: list[tuple[StepBatch, str]] = []
    step = 10 * STEPS
    while batch := await batcher.next_batch(step, AGAIN, 1, is_finished=lambda: True):
        await store.claim_step(config.name, step, batch.claims)
        await backend.forward_backward(batch.samples, config.trainer.loss)
        await backend.optim_step(config.trainer.adam)
        artifact = await backend.publish(config.run_dir / "again" / str(step))
        learned.append((batch, hash_adapter(Path(artifact.path))))
        step += 1
    await backend.close()
    await store.close()
    return learned


@pytest.mark.timeout(300)
@pytest.mark.parametrize("format", ["jsonl", "parquet", "hf"])
def test_an_imported_run_trains_bit_for_bit_alike(original: Tortured, folder: Path, format: str) -> None:
    out, copy = folder / f"out-{format}", folder / format / "original"
    exported = instar(folder, "sessions", "export", original.run_dir, "--to", out, "--format", format)
    assert exported["counts"]["sessions"] == STEPS * 2 * 4
    instar(folder, "sessions", "import", out, "--into", copy)
    config = RunFolder(original.run_dir).read_config()
    # Versions 0 and 1 are in the data, and all of it is to be fresh at 1.
    trainer = config.trainer.model_copy(update={"mode": "async", "max_staleness": 1})
    config = config.model_copy(update={"trainer": trainer})
    own = _copied(original.run_dir, folder / f"own-{format}")
    mine = asyncio.run(learn(config.model_copy(update={"dir": own})))
    theirs = asyncio.run(learn(config.model_copy(update={"dir": copy})))
    assert len(mine) == len(theirs) == STEPS
    for (one, weights), (other, others) in zip(mine, theirs, strict=True):
        assert one.samples
        for left, right in zip(one.samples, other.samples, strict=True):
            assert (left.sample_key, left.session_id, left.spans) == (
                right.sample_key,
                right.session_id,
                right.spans,
            )
            for name in ("token_ids", "mask", "logprobs", "advantages", "versions"):
                assert getattr(left, name).tobytes() == getattr(right, name).tobytes(), name
        assert one.claims == other.claims
        assert weights == others


def _copied(run_dir: Path, to: Path) -> Path:
    """The original's store, so that what one test claims is not claimed for the next."""
    to.mkdir()
    for name in ("store.db", "store.db-wal", "store.db-shm"):
        if (run_dir / name).exists():
            (to / name).write_bytes((run_dir / name).read_bytes())
    return to


@pytest.mark.timeout(300)
def test_a_run_on_the_dataset_alone_learns_what_the_original_learned(
    original: Tortured, folder: Path, model: Path
) -> None:
    """No agent is run, and the weights come out the same: the data was the whole of it."""
    instar(folder, "sessions", "export", original.run_dir, "--as", "golden")
    config = configured(folder, model, "alone", data="dataset:golden")
    del config["rollout"]
    run = start(folder, config)
    assert run.query("SELECT DISTINCT role FROM endpoints WHERE role = 'rollout'") == []
    assert {epoch for (epoch,) in run.query("SELECT epoch FROM claims")} == {0}
    assert run.query("SELECT COUNT(*) FROM steps WHERE state = 'committed'") == [(STEPS,)]
    was, now = (Trained(each.run_dir, STEPS).fingerprint() for each in (original, run))
    assert (now.adapter, now.optimizer) == (was.adapter, was.optimizer)
    assert [(step, reward, advantage) for step, _, reward, advantage in now.trained] == [
        (step, reward, advantage) for step, _, reward, advantage in was.trained
    ]


@pytest.mark.timeout(300)
def test_a_run_on_both_has_them_by_share(original: Tortured, folder: Path, model: Path) -> None:
    instar(folder, "sessions", "export", original.run_dir, "--as", "half", "--format", "parquet")
    shares = [{"source": "live", "share": 0.5}, {"source": "dataset:half", "share": 0.5}]
    run = start(folder, configured(folder, model, "both", data=shares))
    groups = run.query("SELECT DISTINCT step, group_id FROM claims ORDER BY step, group_id")
    assert [(step, group.split("/")[1]) for step, group in groups] == [
        (1, "data"),
        (1, "train"),
        (2, "data"),
        (2, "train"),
    ]
    assert run.query("SELECT COUNT(*) FROM groups WHERE channel = 'train'") == [(STEPS,)]
