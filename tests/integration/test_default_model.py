"""Test that the default model is downloaded into an empty cache and converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from instar.models import DEFAULT_MODEL, is_local, load_tokenizer, resolve_model


def test_default_model_is_downloaded_and_converted_to_unquantized_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSTAR_CACHE", str(tmp_path))
    assert not is_local(DEFAULT_MODEL)
    folder = resolve_model(DEFAULT_MODEL)
    assert is_local(DEFAULT_MODEL)
    assert resolve_model(DEFAULT_MODEL) == folder
    assert [path.name for path in (tmp_path / "models").iterdir()] == [DEFAULT_MODEL], (
        "temporary folders were left behind"
    )
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert model.dtype == torch.bfloat16
    tokenizer = load_tokenizer(folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    reply = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(reply[0])
