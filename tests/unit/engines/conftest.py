from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.tiny import make_tiny_model


@pytest.fixture(scope="session", autouse=True)
def _use_one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with random weights."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(tiny_model, folder, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"))
    return folder


@pytest.fixture(scope="session")
def adapters(tiny_model: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of two adapters with different ranks and layers."""
    other = tmp_path_factory.mktemp("other_adapter")
    config = LoraConfig(r=6, lora_alpha=12, target_modules=["q_proj", "down_proj"])
    save_adapter(tiny_model, other, config, seed=4)
    return [adapter, other]


def save_adapter(model_folder: Path, folder: Path, config: LoraConfig, seed: int = 3) -> None:
    """Save a PEFT adapter with a nonzero update."""
    torch.manual_seed(seed)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
