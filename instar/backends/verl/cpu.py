"""A CPU platform for verl, which itself supports only CUDA, ROCm and NPU."""

# verl is installed in a separate environment.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from verl.plugin.platform import PlatformBase, set_platform


class _CpuModule(ModuleType):
    """torch.cpu plus the torch.cuda functions that verl calls."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def empty_cache(self) -> None: ...

    def memory_allocated(self) -> int:
        return 0

    memory_reserved = memory_allocated

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)


class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuModule("torch.cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        # The base class returns an index, which torch would interpret as a GPU.
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Generator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def _do_nothing(self, *_: object, **__: object) -> None: ...

    set_device = synchronize = set_allocator_settings = empty_cache = _do_nothing
    profiler_start = profiler_stop = cudart = _do_nothing


@cache
def use_cpu() -> None:
    """Select the CPU as verl's platform, which other verl modules read when they are imported."""
    set_platform(PlatformCPU())
