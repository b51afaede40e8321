"""Models with realistic shapes and random weights, which are as expensive to run as trained ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class ModelShape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


SHAPES = {
    "tiny": ModelShape(128, 256, 2, 4, 2, 32, 320),
    "0.6B": ModelShape(1024, 3072, 28, 16, 8, 128, 151_936),
    "4B": ModelShape(2560, 9728, 36, 32, 8, 128, 151_936),
}
"""The larger shapes are those of Qwen3 models."""


def make_model(folder: Path, shape: ModelShape, device: str) -> Path:
    """Save a bf16 model, and a tokenizer with a word for every id and no end-of-sequence token."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    config: Any = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="bfloat16",
    )
    logging.disable_progress_bar()
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(previous_dtype)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(shape.vocab)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
    return folder
