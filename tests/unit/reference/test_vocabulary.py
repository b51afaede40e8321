from __future__ import annotations

from pathlib import Path

import pytest

from instar.config import ModelConfig
from instar.errors import ConfigError
from instar.reference.factory import require_same_vocabulary
from tests.tiny import make_tiny_model, make_tiny_tokenizer


def make_tokenizer_folder(
    folder: Path, vocab_size: int = 320, *, extra_tokens: list[str] | None = None
) -> ModelConfig:
    tokenizer = make_tiny_tokenizer(vocab_size)
    tokenizer.add_tokens(extra_tokens or [])
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return ModelConfig(name=str(folder))


def test_require_same_vocabulary_rejects_teacher_without_model_tokens(tmp_path: Path) -> None:
    model = ModelConfig(name=str(make_tiny_model(tmp_path / "model", hidden=16, layers=1)))
    same = make_tokenizer_folder(tmp_path / "same")
    larger = make_tokenizer_folder(tmp_path / "larger", extra_tokens=["<think>"])
    smaller = make_tokenizer_folder(tmp_path / "smaller", 300)
    require_same_vocabulary(model, same)
    require_same_vocabulary(model, larger)
    with pytest.raises(ConfigError, match=r"reference\.model\.name.*vocabulary.*missing in the teacher"):
        require_same_vocabulary(model, smaller)
    with pytest.raises(ConfigError, match="<think>"):
        require_same_vocabulary(larger, same)
