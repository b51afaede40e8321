"""Tests that models which the local engine or backend would compute wrongly are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from instar.architecture import create_random_copy, shrink_config
from instar.backends.local.backend import LocalBackend
from instar.backends.local.check import check_architecture as check_backend
from instar.config import LocalBackendConfig, LocalEngineConfig, ModelConfig
from instar.engines.local.check import check_architecture as check_engine
from instar.engines.local.engine import LocalEngine
from instar.errors import BackendError, ConfigError, EngineError
from instar.models import cache_dir
from tests.tiny import make_tiny_model, make_tiny_tokenizer

WRONG_TYPES = ("falcon_h1", "diffllama", "bert", "doge", "bart")
"""Types that run, but of which some layers or masks would be ignored."""
FAILING_TYPES = ("mistral3", "glm_moe_dsa", "falcon", "gptj", "stablelm", "mamba")
"""Types whose code fails in other ways with a custom attention function."""


@pytest.fixture(autouse=True)
def _use_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTAR_CACHE", str(tmp_path / "cache"))


def write_config(folder: Path, model_type: str, **settings: Any) -> ModelConfig:
    config = shrink_config(AutoConfig.for_model(model_type, **settings), is_narrow=True)
    config.save_pretrained(folder)
    return ModelConfig(name=str(folder), dtype="fp32", device="cpu", max_context=512)


def make_engine(config: ModelConfig) -> LocalEngine:
    return LocalEngine(config, LocalEngineConfig(threads=1))


def make_backend(config: ModelConfig) -> LocalBackend:
    return LocalBackend(config, LocalBackendConfig())


@pytest.mark.parametrize("model_type", [*WRONG_TYPES, *FAILING_TYPES])
def test_unsupported_architecture_is_refused_with_a_reason_and_an_alternative(
    tmp_path: Path, model_type: str
) -> None:
    config = write_config(tmp_path / "model", model_type)
    with pytest.raises(EngineError, match=r"does not support the model .*: .*vllm"):
        make_engine(config)
    with pytest.raises(BackendError, match=r"does not support the model .*: .*verl"):
        make_backend(config)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("deepseek_v3", {}),  # the dimensions of keys and values differ
        ("granite", {"logits_scaling": 8.0, "attention_multiplier": 0.01}),
        ("cohere", {"logit_scale": 0.25}),
        ("nanochat", {"final_logit_softcapping": 2.0}),
    ],
)
def test_supported_architecture_passes_the_check(
    tmp_path: Path, model_type: str, settings: dict[str, Any]
) -> None:
    config = write_config(tmp_path / "model", model_type, **settings)
    for check in (check_engine, check_backend):
        check(config)
    assert len(list(cache_dir().glob("architectures/*"))) == 2


def test_chunked_attention_is_refused_if_the_chunk_is_longer_than_the_context(tmp_path: Path) -> None:
    config = write_config(tmp_path / "model", "llama4_text", attention_chunk_size=8192)
    with pytest.raises(EngineError, match="would differ from those of transformers"):
        make_engine(config)


async def test_context_with_longrope_ends_at_the_length_of_pretraining(tmp_path: Path) -> None:
    factors: dict[str, Any] = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "rope_theta": 10_000.0}
    config = AutoConfig.for_model(
        "phi3", hidden_size=128, num_attention_heads=4, vocab_size=320, num_hidden_layers=1, pad_token_id=0,
        intermediate_size=64, max_position_embeddings=1024, original_max_position_embeddings=256,
        rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 256, **factors},
    )  # fmt: skip
    create_random_copy(config).save_pretrained(tmp_path / "model")
    model = ModelConfig(name=str(tmp_path / "model"), dtype="fp32", device="cpu", max_context=512)
    engine = LocalEngine(model, LocalEngineConfig(threads=1), tokenizer=make_tiny_tokenizer())
    backend = make_backend(model)
    assert engine.info.max_context == backend._model.max_tokens == 256
    await engine.close()
    await backend.close()


def test_device_that_is_missing_is_reported_as_such(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    folder = make_tiny_model(tmp_path, hidden=48)
    for make in (make_engine, make_backend):
        with pytest.raises(ConfigError, match=r"^model\.device: cuda is set"):
            make(ModelConfig(name=str(folder), device="cuda"))


def test_unknown_model_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(EngineError, match=r"cannot read its config.*unheard_of"):
        make_engine(ModelConfig(name=str(tmp_path), dtype="fp32", device="cpu"))


async def test_only_a_successful_check_is_cached(tmp_path: Path) -> None:
    with pytest.raises(EngineError):
        make_engine(write_config(tmp_path / "bert", "bert"))
    assert not list(cache_dir().glob("architectures/*"))
    folder = make_tiny_model(tmp_path / "tiny", hidden=32)
    config = ModelConfig(name=str(folder), dtype="fp32", device="cpu", max_context=512)
    copied_config = config.model_copy(update={"name": str(shutil.copytree(folder, tmp_path / "copy"))})
    for checked_config in (config, config, copied_config):
        await make_engine(checked_config).close()
        await make_backend(checked_config).close()
    assert len(list(cache_dir().glob("architectures/*"))) == 2


async def test_check_in_a_folder_that_cannot_be_written_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INSTAR_CACHE", str(tmp_path))
    (tmp_path / "architectures").touch()
    folder = make_tiny_model(tmp_path / "tiny", hidden=32)
    await make_engine(ModelConfig(name=str(folder), dtype="fp32", device="cpu", max_context=512)).close()
    assert "will be repeated" in caplog.text
