"""The two built-in agent types: an async Python function and a program."""

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

STDOUT_TAIL_BYTES = 64 * 1024
"""Only this many bytes at the end of a program's output are searched for a reward."""
STDERR_TAIL_BYTES = 800
SECRET_VARIABLES = (
    "INSTAR_ADMIN_KEY",
    "INSTAR_ENGINE_TOKEN",
    "INSTAR_FEEDBACK_KEY",
    "INSTAR_POSTGRES_PASSWORD",
    "INSTAR_PROTOCOL_KEYS",
)
"""Environment variables with Instar's own keys and passwords. Agents must not see them."""


def create_agent(config: AgentConfig) -> Agent:
    return registry.resolve_section("agents", config)(config)


class FunctionAgent(Agent):
    """An agent that calls ``function(task.data, session, **args)``, which returns None, a reward, or (turns,
    reward). If the function has a method ``aclose``, it is awaited at the end of the run."""

    def __init__(self, config: FunctionAgentConfig) -> None:
        function = registry.load_object(config.function)
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 — an object with an async __call__
        )
        if not is_async:
            raise ConfigError(
                f"rollout.agent.function: {config.function} is not async; define it with `async def`"
            )
        self.name = config.function
        self.function: Callable[..., Awaitable[Any]] = function
        self.args = config.args

    async def run(self, task: Task, session: AgentSession) -> AgentResult:
        try:
            returned = await self.function(task.data, session, **self.args)
        except SystemExit as error:
            raise AgentError(f"the agent {self.name} called exit({error.code!r})") from error
        match returned:
            case None:
                return AgentResult()
            case bool() | int() | float():
                return AgentResult(reward=float(returned))
            case (int() as turns, None | int() | float() as reward):
                return AgentResult(reward=None if reward is None else float(reward), turns=turns)
            case _:
                expected = "None, a reward or a tuple (turns, reward)"
                raise AgentError(f"the agent {self.name} must return {expected}, not {returned!r:.200}")

    async def close(self) -> None:
        if aclose := getattr(self.function, "aclose", None):
            await aclose()


class CommandAgent(Agent):
    """An agent that runs a program. A guard process ensures that the program and its children exit when
    the session ends. The last line of the output may be JSON with a reward: ``{"reward": 1.0}``."""

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
        # Files instead of pipes, because a pipe only closes when every process that inherited it has exited.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = await self._execute(command, env, out, err)
            if code != 0:
                exit_text = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
                stderr = _read_tail(err, STDERR_TAIL_BYTES).strip() or "no output on stderr"
                raise AgentError(f"the agent's program {command[0]!r} {exit_text}: {stderr}")
            return AgentResult(reward=_parse_reward(_read_tail(out, STDOUT_TAIL_BYTES)))

    async def _execute(self, command: list[str], env: dict[str, str], out: IO[bytes], err: IO[bytes]) -> int:
        try:
            process = await asyncio.create_subprocess_exec(
                *guard_command(command, kill_immediately=True),
                env=env,
                cwd=self.config.cwd,
                stdin=asyncio.subprocess.PIPE,  # the guard exits when this pipe closes
                stdout=out,
                stderr=err,
                start_new_session=True,  # the guard must survive if the rollout's process group is killed
            )
        except OSError as error:
            reason = error.strerror or error
            raise AgentError(f"cannot start the agent's program {command[0]!r}: {reason}") from error
        assert process.stdin is not None
        try:
            return await process.wait()
        finally:
            process.stdin.close()
            await process.wait()


def fill_template(part: str, data: Json) -> str:
    """Replace each ``{field}`` in ``part`` with the value of that field in ``data``. Keep other braces."""

    def replace_field(match: re.Match[str]) -> str:
        if match[1] not in data:
            return match[0]
        value = data[match[1]]
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()

    return re.sub(r"\{(\w+)\}", replace_field, part)


def _read_tail(file: IO[bytes], size: int) -> str:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - size))
    return file.read().decode(errors="replace")


def _parse_reward(output: str) -> float | None:
    lines = output.strip().splitlines()
    if not lines or not lines[-1].lstrip().startswith("{"):
        return None
    try:
        last_line = msgspec.json.decode(lines[-1])
    except msgspec.DecodeError:
        return None  # the line is other output that happens to start with a brace
    reward = cast(Json, last_line).get("reward")
    if reward is not None and not isinstance(reward, int | float):
        raise AgentError(f"the agent's program printed a reward that is not a number: {lines[-1]:.200}")
    return None if reward is None else float(reward)
