"""Read the settings of adapter folders in PEFT's format, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""PEFT's prefix of the names of a model's modules."""
UNSUPPORTED_SETTINGS = (
    "use_dora",
    "modules_to_save",
    "fan_in_fan_out",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "use_qalora",
    "alora_invocation_tokens",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
)


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    rank: int
    alpha: float
    """The scale of the adapter, so that its output is multiplied by ``alpha / rank``."""
    targets: list[str] | str
    """The names of the adapted modules, or a pattern that they match."""
    base_model: str
    """The name or path of the model that the adapter was trained on, or an empty string if it is unknown."""


def read_adapter_settings(folder: Path) -> AdapterSettings:
    """Return the settings of the adapter in the folder. Raises ValueError if they cannot be read, or if the
    adapter is of a kind that Instar does not support."""
    try:
        config: dict[str, Any] = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"The adapter in {folder} cannot be read: {error}") from error
    _check_supported(config, folder)
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        if rank < 1:
            raise ValueError(f"r is {rank}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"The adapter in {folder} cannot be read: `r` and `lora_alpha` in {CONFIG_FILE} must be "
            f"positive numbers ({type(error).__name__}: {error})"
        ) from error
    targets: Any = config.get("target_modules") or []
    return AdapterSettings(
        rank=rank,
        alpha=alpha * math.sqrt(rank) if config.get("use_rslora") else alpha,
        targets=targets if isinstance(targets, str) else sorted(targets),
        base_model=config.get("base_model_name_or_path") or "",
    )


def _check_supported(config: dict[str, Any], folder: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise _make_unsupported_error(folder, f"has type {config.get('peft_type')}")
    for name in UNSUPPORTED_SETTINGS:
        if config.get(name):
            raise _make_unsupported_error(folder, f"uses {name}")
    if config.get("bias", "none") != "none":
        raise _make_unsupported_error(folder, "trains biases")
    # These methods also change the base weights, and the adapter's folder does not contain the change.
    init = str(config.get("init_lora_weights", True)).lower()
    if init.startswith(("pissa", "olora", "loftq", "corda", "lora_ga")):
        raise _make_unsupported_error(folder, f"was initialized with {init}")


def _make_unsupported_error(folder: Path, problem: str) -> ValueError:
    return ValueError(f"The adapter in {folder} {problem}, which Instar does not support.")
