"""The files in a run's folder, and the names and configs of its engine processes."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from instar.config import (
    CloudSection,
    EngineConfig,
    EngineReferenceConfig,
    MixedEngineConfig,
    PluginConfig,
    RunConfig,
    UpstreamEngineConfig,
    VllmEngineConfig,
)
from instar.config.run import STORED_SETTINGS
from instar.errors import ConfigError, InstarError
from instar.types import Json


def public_settings(config: RunConfig) -> Json:
    """Return the settings as JSON, without the agent's environment variables, which often contain keys."""
    return config.model_dump(mode="json", exclude={"rollout": {"agent": {"env"}}})


def engine_names(config: RunConfig) -> list[str]:
    """Return the names of the run's engine processes, or an empty list if a provider serves the model."""
    return _process_names("engine", config.engine)


def teacher_names(config: RunConfig) -> list[str]:
    """Return the names of the teacher's processes, or an empty list if no engine is used as a teacher."""
    section = config.trainer.reference
    if not isinstance(section, EngineReferenceConfig) or section.weight == 0:
        return []
    return _process_names("teacher", section.engine)


def teacher_config(config: RunConfig) -> RunConfig:
    section = config.trainer.reference
    assert isinstance(section, EngineReferenceConfig)
    changes: Json = {"model": section.model, "engine": section.engine}
    if isinstance(config.backend, CloudSection):
        # `base_model` is the name of the student on a training service.
        changes["backend"] = config.backend.model_copy(update={"base_model": None})
    return config.model_copy(update=changes)


def _process_names(role: str, engine: EngineConfig) -> list[str]:
    if isinstance(engine, UpstreamEngineConfig):
        return []
    count = _count_processes(engine)
    return [role] if count == 1 else [f"{role}-{index}" for index in range(count)]


def _count_processes(engine: EngineConfig) -> int:
    return 1 if isinstance(engine, PluginConfig | UpstreamEngineConfig) else engine.count


def engine_process_config(config: RunConfig, index: int) -> RunConfig:
    """Return the config of one engine process: its part of a mixed engine, and only its own vLLM server."""
    engine = config.engine
    if isinstance(engine, MixedEngineConfig):
        for part in engine.parts:
            if index < _count_processes(part):
                return engine_process_config(config.model_copy(update={"engine": part}), index)
            index -= _count_processes(part)
    if isinstance(engine, VllmEngineConfig) and engine.servers:
        engine = engine.model_copy(update={"servers": [engine.servers[index]]})
    return config.model_copy(update={"engine": engine})


def engine_python(config: RunConfig) -> str | None:
    """Return the interpreter to run an engine process with, or None for the current one. vLLM's `python`
    setting is for its server, not for this process."""
    return None if isinstance(config.engine, VllmEngineConfig) else config.engine.python


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.python_path_file = path / "python_path"
        """The folders from which the run imports functions, for commands that use the run later."""
        self.logs = path / "logs"
        self.locks = path / "locks"
        self.report = path / "report"
        self.metrics = path / "metrics.jsonl"
        self.control_socket = path / "control.sock"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def create(self, config: RunConfig) -> None:
        """Create the folder and write the resolved config, which every role reads."""
        self.logs.mkdir(parents=True, exist_ok=True)
        scratch = self.config_file.with_suffix(".partial")
        scratch.touch(mode=0o600)  # an agent's environment may contain keys
        scratch.write_text(config.model_dump_json(indent=2), encoding="utf-8")
        scratch.replace(self.config_file)
        self.python_path_file.write_text(os.environ.get("PYTHONPATH", ""), encoding="utf-8")
        self.metrics.touch()  # created privately here, because the rollout writes with the user's umask

    def make_private(self) -> str:
        """Remove other users' access if the folder already contains a run, else recommend it. Return a
        message for the user, or an empty string if other users had no access."""
        mode = self.path.stat().st_mode & 0o777
        if not mode & 0o077:
            return ""
        if self.config_file.is_file():
            with suppress(OSError):  # some file systems do not support modes
                self.path.chmod(mode & 0o700)
                return f"made {self.path} private, because other users could read it (mode {mode:o})"
        return (
            f"other users may read {self.path} (mode {mode:o}); to prevent this, run: chmod 700 {self.path}"
        )

    def read_config(self) -> RunConfig:
        if not self.config_file.is_file():
            raise ConfigError(f"{self.path} is not a run folder: it has no config.json")
        try:
            config = RunConfig.model_validate_json(self.config_file.read_bytes(), context=STORED_SETTINGS)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"{self.config_file} is invalid, perhaps because a different version of Instar wrote it: "
                f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            ) from error
        # The folder may have been moved since the config was written.
        return config.model_copy(update={"dir": self.path})

    def lock(self, name: str, *, timeout: float = 20.0) -> int:
        """Lock a role until the returned descriptor is closed, or raise InstarError after ``timeout`` s."""
        self.locks.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.locks / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(descriptor)
                    raise InstarError(
                        f"the {name} of {self.path} is already running in another process; stop it first"
                    ) from None
                time.sleep(0.05)
