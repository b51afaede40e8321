"""Run Schemathesis, which generates requests from the OpenAPI description, in its own environment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gateway_parts.peers import install_packages
from gateway_parts.processes import MeasurementError

from fuzz_parts.fuzzer import HANG_TIMEOUT_SECONDS

REQUIREMENT = "schemathesis==4.32.5"


class Schemathesis:
    """A worker process that runs Schemathesis (see schema_worker.py)."""

    def __init__(
        self, environment: Path, url: str, keys: Sequence[str], sessions: Sequence[tuple[str, str]]
    ) -> None:
        script = Path(__file__).with_name("schema_worker.py")
        self._log = (environment.parent / "schemathesis-output.log").open("w")
        self._process = subprocess.Popen(
            [environment / "bin" / "python", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        settings = {
            "url": url,
            "keys": list(keys),
            "sessions": list(sessions),
            "timeout_seconds": HANG_TIMEOUT_SECONDS,
        }
        self._write(settings)

    @staticmethod
    def install(cache: Path, log: Callable[[str], None]) -> Path:
        """Install Schemathesis if necessary, and return its environment."""
        environment = cache / "schemathesis"
        install_packages(environment, REQUIREMENT, [[REQUIREMENT]], log)
        return environment

    def run_batch(self, base: int, number: int) -> dict[str, Any]:
        """Run one batch and return its result. Raises MeasurementError if the worker exits."""
        self._write([base, number])
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MeasurementError(f"Schemathesis exited unexpectedly; see {self._log.name}")
        return json.loads(line)

    def _write(self, value: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait()
        self._log.close()
