"""Tests for the context that a run chooses if `model.max_context` is not set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from instar.cluster.context_length import choose_context, resolve_context
from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from tests.tiny import make_tiny_tokenizer

GIB = 2**30
TOKEN_BYTES = 2 * 4 * 2 * 16 * 4
"""The size of a token's keys and values: 4 layers with 2 heads of 16 values in fp32."""


def make_config(folder: Path, *, max_positions: int = 131_072, **settings: Any) -> RunConfig:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaConfig(**sizes, max_position_embeddings=max_positions).save_pretrained(folder / "model")
    make_tiny_tokenizer().save_pretrained(folder / "model")
    model = {"name": str(folder / "model"), "device": "cpu", **settings.pop("model", {})}
    return RunConfig.model_validate({"dir": folder / "run", "model": model, **settings})


@pytest.mark.parametrize(
    ("max_positions", "free_memory", "settings", "expected"),
    [
        (131_072, 8 * GIB, {}, (8192, "the maximum on a CPU")),
        (4096, 8 * GIB, {}, (4096, "the model's maximum")),
        (512, 8 * GIB, {}, (512, "the model's maximum")),
        (131_072, 8 * 5000 * TOKEN_BYTES, {}, (4096, "limited by the free memory")),
        (131_072, 0, {}, (2048, "the least that is chosen")),
        (1024, 0, {}, (1024, "the least that is chosen")),
        (131_072, 8 * GIB, {"engine": {"type": "local", "kv_tokens": 5000}}, (5000, "engine.kv_tokens")),
        (
            131_072,
            8 * GIB,
            {"engine": {"type": "vllm", "kv_gib": 3500 * TOKEN_BYTES / GIB}},
            (3072, "limited by engine.kv_gib"),
        ),
        (
            131_072,
            8 * GIB,
            {"engine": {"type": "vllm", "servers": ["http://localhost:1"]}},
            (2048, "the maximum for servers that are already running"),
        ),
        (
            131_072,
            8 * GIB,
            {"cluster": {"type": "ray"}},
            (8192, "the maximum for machines whose memory is not known"),
        ),
    ],
)
def test_context_is_the_lowest_limit(
    tmp_path: Path,
    max_positions: int,
    free_memory: int,
    settings: dict[str, Any],
    expected: tuple[int, str],
) -> None:
    config = make_config(tmp_path, max_positions=max_positions, **settings)
    limit = choose_context(config, free_memory)
    assert (limit.tokens, limit.reason) == expected


def test_context_of_a_model_without_a_known_maximum_is_2048(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (tmp_path / "model" / "config.json").write_text("{}")
    assert choose_context(config, 8 * GIB).tokens == 2048


def test_context_counts_the_weights_as_used_memory(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    free_memory = 16 * 5000 * TOKEN_BYTES
    assert choose_context(config, free_memory).tokens == 8192
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.truncate(free_memory // 6)
    assert choose_context(config, free_memory).tokens == 4096


def test_resolve_context_sets_and_reports_it_and_an_existing_run_keeps_it(tmp_path: Path) -> None:
    config, folder, messages = make_config(tmp_path, max_positions=3000), RunFolder(tmp_path / "run"), []
    resolved = resolve_context(config, folder, messages.append)
    assert resolved.model.max_context == 3000
    assert messages == ["context: 3,000 tokens (the model's maximum); set model.max_context to change it"]
    folder.create(resolved)
    assert resolve_context(make_config(tmp_path), folder, messages.append).model.max_context == 3000
    explicit = make_config(tmp_path, model={"max_context": 100})
    assert resolve_context(explicit, folder, messages.append) == explicit
    assert len(messages) == 1, "only a chosen context is reported"


def test_resolve_context_gives_a_teacher_the_context_of_the_run(tmp_path: Path) -> None:
    teacher = {"type": "engine", "model": {"name": "teacher"}, "engine": "local"}
    config = make_config(tmp_path, model={"max_context": 700}, trainer={"reference": teacher})
    resolved = resolve_context(config, RunFolder(tmp_path / "run"), print)
    assert resolved.trainer.reference.model.max_context == 700


def test_resolve_context_with_a_provider_changes_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path, engine={"type": "upstream", "base_url": "http://127.0.0.1:9/v1"})
    assert resolve_context(config, RunFolder(tmp_path / "run"), print) is config
