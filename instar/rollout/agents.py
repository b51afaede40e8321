"""The two kinds of agent: an async Python function, and a program."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import tempfile
from collections.abc import Awaitable, Callable
from typing import IO, Any, cast

import msgspec

from instar import registry
from instar.config import AgentConfig, CommandAgentConfig, FunctionAgentConfig
from instar.errors import AgentError, ConfigError
from instar.rollout.base import Agent, AgentResult, AgentSession
from instar.subprocess_guard import guard_command
from instar.types import Json, Task

OUTPUT_TAIL_BYTES = 64 * 1024
"""The number of bytes that are read from the end of a program's output, where its reward may be."""
STDERR_TAIL_BYTES = 800
SECRET_VARIABLES = frozenset({"INSTAR_ADMIN_KEY", "INSTAR_ENGINE_TOKEN", "INSTAR_PROTOCOL_KEYS"})
"""Variables that hold keys of the run itself and that agents must not see."""


def create_agent(config: AgentConfig) -> Agent:
    return registry.resolve_section("agents", config)(config)


class FunctionAgent(Agent):
    """An agent that calls ``function(task.data, session, **args)``. The function returns None, a reward, or
    (turns, reward). If the function has an ``aclose`` method, it is awaited at the end of the run."""

    def __init__(self, config: FunctionAgentConfig) -> None:
        function = registry.load_object(config.function)
        if not _is_async(function):
            raise ConfigError(f"agent.function: {config.function} is not an async function")
        self.name = config.function
        self.function: Callable[..., Awaitable[Any]] = function
        self.args = config.args

    async def run(self, task: Task, session: AgentSession) -> AgentResult:
        try:
            returned = await self.function(task.data, session, **self.args)
        except SystemExit as error:
            raise AgentError(f"{self.name} called exit({error.code!r})") from error
        match returned:
            case None:
                return AgentResult()
            case bool() | int() | float():
                return AgentResult(reward=float(returned))
            case (int() as turns, None | int() | float() as reward):
                return AgentResult(reward=None if reward is None else float(reward), turns=turns)
            case _:
                raise AgentError(
                    f"{self.name} returned {returned!r:.200}; "
                    "an agent returns None, a reward, or (turns, reward)"
                )

    async def close(self) -> None:
        if aclose := getattr(self.function, "aclose", None):
            await aclose()


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 — an object with an async __call__
    )


class CommandAgent(Agent):
    """An agent that runs a program. A guard process ensures that neither the program nor its children outlive
    the session or the rollout. The last line of the output may be JSON with a reward: ``{"reward": 1.0}``."""

    def __init__(self, config: CommandAgentConfig) -> None:
        self.config = config

    async def run(self, task: Task, session: AgentSession) -> AgentResult:
        command = [fill_template(part, task.data) for part in self.config.command]
        env = {
            **{name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES},
            **self.config.env,
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "INSTAR_TASK": msgspec.json.encode(task.data).decode(),
            "INSTAR_SESSION_ID": session.session_id,
        }
        # Files instead of pipes, because a pipe closes only when every process that inherited it has exited.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = await self._execute(command, env, out, err)
            if code != 0:
                exit_text = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
                stderr = _read_tail(err, STDERR_TAIL_BYTES).strip() or "no stderr"
                raise AgentError(f"{command[0]!r} {exit_text}: {stderr}")
            return AgentResult(reward=_parse_reward(_read_tail(out, OUTPUT_TAIL_BYTES)))

    async def _execute(self, command: list[str], env: dict[str, str], out: IO[bytes], err: IO[bytes]) -> int:
        try:
            process = await asyncio.create_subprocess_exec(
                *guard_command(command, kill_immediately=True),
                env=env,
                cwd=self.config.cwd,
                stdin=asyncio.subprocess.PIPE,  # the guard exits when this pipe closes
                stdout=out,
                stderr=err,
                start_new_session=True,  # the guard must survive if the rollout's group is killed
            )
        except OSError as error:
            raise AgentError(f"cannot start {command[0]!r}: {error.strerror or error}") from error
        assert process.stdin is not None
        try:
            return await process.wait()
        finally:
            process.stdin.close()
            await process.wait()


def fill_template(part: str, data: Json) -> str:
    """Return ``part`` with each ``{field}`` replaced with that field of the task; other braces are kept."""

    def field_text(match: re.Match[str]) -> str:
        if match[1] not in data:
            return match[0]
        value = data[match[1]]
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()

    return re.sub(r"\{(\w+)\}", field_text, part)


def _read_tail(file: IO[bytes], size: int) -> str:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - size))
    return file.read().decode(errors="replace")


def _parse_reward(output: str) -> float | None:
    lines = output.strip().splitlines()
    if not lines or not lines[-1].lstrip().startswith("{"):
        return None
    try:
        last = msgspec.json.decode(lines[-1])
    except msgspec.DecodeError:
        return None  # the last line is other output that happens to begin with a brace
    reward = cast(Json, last).get("reward")
    if reward is not None and not isinstance(reward, int | float):
        raise AgentError(f"the program's reward is not a number: {lines[-1]:.200}")
    return None if reward is None else float(reward)
