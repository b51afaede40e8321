"""Install TRL into an environment of its own and train with it, in a separate process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from gateway_parts.peers import install_packages
from reliability_parts.state_file import CACHE

from learning_parts.instar_run import BENCH, run_to_end
from learning_parts.results import Checkpoint, read_checkpoints
from learning_parts.tasks import GROUP_SIZE, VLLM_GPU_MEMORY

ENVIRONMENTS = CACHE / "learning-environments"
# torch is installed first, so that no other requirement selects its build; on a GPU, vLLM selects it. The
# project itself provides the agents, the task sets and the renderer.
FIRST_PACKAGE = {"cpu": "torch==2.13.0", "gpu": "vllm==0.26.0"}
OTHER_STEPS = [["-e", f"{BENCH.parent}[local]", "textarena>=0.7.4,<0.8"], ["trl==1.16.0"]]
PROGRESS_FILE = "progress.jsonl"


@dataclass(frozen=True)
class TrlSettings:
    """The settings that differ from TRL's defaults, apart from those that the comparison fixes."""

    lr: float = 3e-4
    groups: int = 3
    """The number of groups of 8 in a step."""
    dtype: Literal["fp32", "mixed", "bf16"] = "fp32"
    """The precision. ``mixed``: weights in fp32 and bf16 autocast while training, which is TRL's default on
    hardware with bf16. ``bf16``: the same with weights in bf16. The adapter is always in fp32."""
    micro_batch: int = 8
    """The number of sequences in one forward and backward pass, which affects memory, but not the update."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of GRPOConfig."""
    vllm_gpu_memory: float | None = None
    """The share of the GPU's memory for vLLM, which generates in the trainer's process. None: generate with
    transformers."""

    def adapt_to_gpu(self) -> TrlSettings:
        """Return the settings for a GPU: with vLLM, bf16 and one pass for a whole step."""
        # Continuous batching is another way to generate without vLLM.
        options = {k: v for k, v in self.options.items() if k != "use_transformers_continuous_batching"}
        return replace(
            self,
            dtype="bf16" if self.dtype == "bf16" else "mixed",
            micro_batch=self.groups * GROUP_SIZE,
            options=options,
            vllm_gpu_memory=VLLM_GPU_MEMORY,
        )


TRL_SETTINGS = TrlSettings()
"""The settings of the comparison, to be chosen with `--sweep`."""
SWEEP: dict[str, TrlSettings] = {
    "base": TrlSettings(),
    "lr 1e-4": TrlSettings(lr=1e-4),
    "lr 1e-3": TrlSettings(lr=1e-3),
    "6 groups": TrlSettings(groups=6),
    "mixed": TrlSettings(dtype="mixed"),
    "bf16": TrlSettings(dtype="bf16"),
    "continuous batching": TrlSettings(options={"use_transformers_continuous_batching": True}),
    "1 group": TrlSettings(groups=1),
    "2 groups, lr 1e-3": TrlSettings(groups=2, lr=1e-3),
    "mixed, 6 groups": TrlSettings(dtype="mixed", groups=6),
    "bf16, lr 1e-3": TrlSettings(dtype="bf16", lr=1e-3),
    "micro batch 24": TrlSettings(micro_batch=24),
    "2 updates per batch": TrlSettings(options={"num_iterations": 2}),
}
"""The settings that are compared on the development task. TRL makes few updates in the time, so several of
them make more updates or larger ones."""


def make_sweep(*, on_gpu: bool) -> dict[str, TrlSettings]:
    """Return the settings to compare. Several of them are the same on a GPU, and only the first is kept."""
    if not on_gpu:
        return SWEEP
    sweep: dict[str, TrlSettings] = {}
    for name, settings in SWEEP.items():
        if (adapted := settings.adapt_to_gpu()) not in sweep.values():
            sweep[name] = adapted
    return sweep


def install_trl(log: Callable[[str], None], *, on_gpu: bool) -> str:
    """Install TRL, and vLLM for a GPU, into an environment of its own. Return its interpreter."""
    environment = ENVIRONMENTS / ("trl-gpu" if on_gpu else "trl")
    steps = [[FIRST_PACKAGE["gpu" if on_gpu else "cpu"]], *OTHER_STEPS]
    install_packages(environment, "TRL 1.16.0", steps, log)
    return str(environment / "bin" / "python")


def run_trl(
    task_name: str, seed: int, seconds: float, folder: Path, settings: TrlSettings, python: str
) -> list[Checkpoint]:
    """Train with GRPOTrainer and the interpreter ``python`` in ``folder``, and return its checkpoints."""
    arguments = {"task": task_name, "seed": seed, "seconds": seconds, "settings": asdict(settings)}
    (folder / "arguments.json").write_text(json.dumps(arguments, indent=1))
    run_to_end([python, "-m", "learning_parts.trl_worker", "arguments.json"], folder, seconds)
    return read_checkpoints(folder / PROGRESS_FILE)
