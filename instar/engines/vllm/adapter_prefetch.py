"""Inside vLLM's workers: adapters are read while the server goes on sampling.

vLLM reads an adapter's file between two steps, and every stream waits for it: some 400 small tensors are
read, cast, packed and copied one after another. Here that is done in a thread before vLLM is told of the
adapter, and what remains between two steps is the copying to the GPU.
"""

# vLLM lives in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

SWITCH_SECONDS = 0.0002
"""How long the thread may keep the interpreter to itself while the server samples; Python's own 5 ms would be
seen in every token."""


class AdapterPrefetcher:
    """Mixed into vLLM's worker class; its names must be none of the worker's."""

    device: torch.device
    model_runner: Any

    def instar_read_adapter(self, path: str) -> dict[str, Any]:
        """Begin to read; whether it is ``done`` is answered when it is asked for again."""
        if "instar_ahead" not in self.__dict__:
            self.__dict__["instar_ahead"] = _AdapterPrefetch(self.model_runner.lora_manager, self.device)
        return self.__dict__["instar_ahead"].read(path)


class _AdapterPrefetch:
    """Holds one adapter that was read, or is being."""

    def __init__(self, manager: Any, device: torch.device) -> None:
        self._device = device
        self._manager = manager
        self._read = manager._load_adapter
        self._path = ""
        self._found: Any = None
        self._error = ""
        self._reading: threading.Thread | None = None
        # vLLM asks its manager for the adapter's weights by this method alone.
        manager._load_adapter = self._take

    def read(self, path: str) -> dict[str, Any]:
        if path != self._path:
            if self._reading is not None:
                self._reading.join()
            self._path, self._found, self._error = path, None, ""
            self._reading = threading.Thread(target=self._work, args=(path,), daemon=True)
            self._reading.start()
        if self._error:
            self._path = ""
            return {"error": self._error}
        return {"done": self._found is not None}

    def _work(self, path: str) -> None:
        from vllm.lora.request import LoRARequest

        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with _yielding():
                found = self._read(LoRARequest("ahead", 1, path))
                # vLLM does this too when it adds the adapter; it finds nothing left to do then.
                self._manager._adapter_manager._create_merged_loras_inplace(found)
            self._found = found
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told to who asks
            self._error = f"{type(error).__name__}: {error}"

    def _take(self, request: Any) -> Any:
        if request.lora_path != self._path or self._found is None:
            return self._read(request)
        found, self._path, self._found = self._found, "", None
        return found.clone(request.lora_int_id)


@contextmanager
def _yielding() -> Generator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
