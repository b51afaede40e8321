"""Run SkyRL's Tinker server on a CPU, in an environment that has SkyRL.

    python skyrl_server.py api PORT MODEL FOLDER     the HTTP server
    python skyrl_server.py engine ARGUMENTS          the engine, which the HTTP server starts

SkyRL expects Python 3.12 and starts its engine with `uv run`. On Python 3.11, pydantic requires the TypedDict
from typing_extensions, so this script replaces the one in `typing`. It also starts the engine by running
itself instead of `uv run`, to stay in the same environment.
"""

from __future__ import annotations

import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment, misc]


def serve(port: int, model: str, folder: str) -> None:
    import uvicorn
    from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig, config_to_argv

    def build_engine_command(parent: list[str], config: EngineConfig) -> list[str]:
        return [sys.executable, __file__, "engine", *config_to_argv(config)]

    api._build_uv_run_cmd_engine = build_engine_command
    api.app.state.engine_config = EngineConfig(
        base_model=model,
        backend="jax",
        backend_config={"max_lora_adapters": 4, "max_lora_rank": 8, "enforce_eager": False},
        checkpoints_base=f"{folder}/checkpoints",
        database_url=f"sqlite:///{folder}/tinker.db",
    )
    uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="warning")


def run_engine(arguments: list[str]) -> None:
    from skyrl.tinker.engine import main

    sys.argv = [sys.argv[0], *arguments]
    main()


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        run_engine(sys.argv[2:])
    else:
        serve(int(sys.argv[2]), sys.argv[3], sys.argv[4])
