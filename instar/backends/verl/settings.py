"""The settings of a rank, and their translation to verl's config."""

# verl is installed in a separate environment.
# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from instar.config import LoraConfig


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    folder: str
    """The folder of the base model."""
    device: str
    dtype: str
    """The dtype of the computation, `fp32` or `bf16`. The sharded weights are fp32."""
    lora: LoraConfig | None
    ranks: int
    deadline: float
    threads: int | None = None


def training_config(settings: WorkerSettings) -> Any:
    """Return verl's TrainingWorkerConfig."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )

    lora = settings.lora
    adapter: dict[str, Any] = {"lora_rank": 0}
    if lora is not None:
        adapter = {"lora_rank": lora.rank, "lora_alpha": lora.alpha, "target_modules": lora.targets}
    compute = "fp32" if settings.dtype == "fp32" else "bf16"
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=settings.folder,
            load_tokenizer=False,
            # Packing without padding needs FlashAttention, which CPUs and some GPUs do not have.
            use_remove_padding=False,
            override_config={"attn_implementation": "sdpa"},
            **adapter,
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            # Without this, verl leaves the root's weights gathered after a forward pass, and the next pass
            # would not use the weights of a step in between.
            fsdp_size=settings.ranks,
            model_dtype="fp32",
            mixed_precision={"param_dtype": compute, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
        ),
        # Every field is set again at each step.
        optimizer_config=FSDPOptimizerConfig(),
        checkpoint_config=CheckpointConfig(save_lora_only=lora is not None),
    )
