"""Reads adapters in vLLM's workers while they continue to sample.

vLLM normally reads an adapter between two steps, so every stream waits until some 400 small tensors are read,
cast, packed and copied. Here a thread reads the adapter before vLLM loads it, so only the copy to the GPU is
left between two steps.
"""

# vLLM runs in its own environment.
# pyright: reportMissingImports=false
from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

SWITCH_INTERVAL_SECONDS = 0.0002
"""The reading thread yields to other threads after this many seconds. Python's default would delay tokens."""


class AdapterPrefetcher:
    """A mixin for vLLM's worker class. Its method and attribute names must be unique in that class."""

    device: torch.device
    model_runner: Any

    def instar_read_adapter(self, path: str) -> dict[str, Any]:
        """Read the adapter in the background. Call again until ``done`` is true or ``error`` is set."""
        if "instar_prefetch" not in self.__dict__:
            self.__dict__["instar_prefetch"] = _AdapterReader(self.model_runner.lora_manager, self.device)
        return self.__dict__["instar_prefetch"].read(path)


class _AdapterReader:
    def __init__(self, manager: Any, device: torch.device) -> None:
        self._device = device
        self._manager = manager
        self._load_adapter = manager._load_adapter
        self._path = ""
        self._adapter: Any = None
        self._error = ""
        self._thread: threading.Thread | None = None
        # vLLM's manager reads adapters only through this method.
        manager._load_adapter = self._take_adapter

    def read(self, path: str) -> dict[str, Any]:
        if path != self._path:
            if self._thread is not None:
                self._thread.join()
            self._path, self._adapter, self._error = path, None, ""
            self._thread = threading.Thread(target=self._read_in_thread, args=(path,), daemon=True)
            self._thread.start()
        if self._error:
            self._path = ""
            return {"error": self._error}
        return {"done": self._adapter is not None}

    def _read_in_thread(self, path: str) -> None:
        from vllm.lora.request import LoRARequest

        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with _short_switch_interval():
                adapter = self._load_adapter(LoRARequest("prefetch", 1, path))
                # vLLM calls this again when it adds the adapter, but by then there is nothing left to do.
                self._manager._adapter_manager._create_merged_loras_inplace(adapter)
            self._adapter = adapter
        except Exception as error:  # noqa: BLE001 - every error is returned to the caller
            self._error = f"{type(error).__name__}: {error}"

    def _take_adapter(self, request: Any) -> Any:
        if request.lora_path != self._path or self._adapter is None:
            return self._load_adapter(request)
        adapter, self._path, self._adapter = self._adapter, "", None
        return adapter.clone(request.lora_int_id)


@contextmanager
def _short_switch_interval() -> Generator[None]:
    previous = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(previous)
