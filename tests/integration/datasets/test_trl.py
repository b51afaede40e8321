"""Tests that TRL's trainers accept the SFT and DPO exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from instar.store.sqlite import SqliteStore
from tests.tiny import make_tiny_model
from tests.unit.datasets.harness import export_all, fill_store

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # TRL's warnings are not ours to fix
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=2048))


@pytest.fixture
async def export_folder(tmp_path: Path) -> Path:
    store = SqliteStore(tmp_path / "store.db")
    await fill_store(store)
    for format in ("sft", "dpo"):
        await export_all(store, tmp_path / format, format=format)
    await store.close()
    return tmp_path


def load_rows(path: Path, cache: Path) -> Any:
    import datasets

    return datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))


def make_one_step_args(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }


@pytest.mark.parametrize("layout", ["messages", "prompt_completion"])
def test_sft_trainer_accepts_the_exported_rows(export_folder: Path, model: str, layout: str) -> None:
    import trl

    data = load_rows(export_folder / "sft" / f"{layout}.jsonl", export_folder / "cache")
    config = trl.SFTConfig(**make_one_step_args(export_folder))
    trainer = trl.SFTTrainer(model, args=config, train_dataset=data)
    assert trainer.train().training_loss > 0


def test_dpo_trainer_accepts_the_exported_rows(export_folder: Path, model: str) -> None:
    import trl

    data = load_rows(export_folder / "dpo" / "pairs.jsonl", export_folder / "cache")
    assert set(data.column_names) >= {"prompt", "chosen", "rejected"}
    config = trl.DPOConfig(**make_one_step_args(export_folder))
    trainer = trl.DPOTrainer(model, args=config, train_dataset=data)
    assert trainer.train().training_loss > 0
