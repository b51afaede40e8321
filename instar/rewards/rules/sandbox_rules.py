"""Rules that run in the sandbox: a command that checks the answer, or unit tests of the answer's code."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import sys
from pathlib import Path
from typing import TypeVar

from instar.config import CommandRewardConfig, TestsRewardConfig
from instar.errors import ConfigError
from instar.models import usable_cores
from instar.rewards.base import ScoringContext, Transcript
from instar.rewards.rules.answers import (
    MAX_DETAIL_CHARS,
    AnswerRule,
    SandboxedConfig,
    extract_answer,
    get_expected_answers,
)
from instar.rewards.sandbox.base import Sandbox, SandboxJob, SandboxLimits, SandboxResult
from instar.rewards.sandbox.factory import create_sandbox
from instar.types import Reward, Task

RUNNER_SCRIPT = Path(__file__).with_name("sandbox_runner.py")
PYTEST_PLUGIN = Path(__file__).with_name("sandbox_pytest_plugin.py")
C = TypeVar("C", bound=SandboxedConfig)


class SandboxedRule(AnswerRule[C]):
    background = True

    def __init__(self, config: C) -> None:
        super().__init__(config)
        settings = config.sandbox
        self.readable_paths = [path.expanduser() for path in settings.read]
        self.limits = SandboxLimits(**settings.model_dump(exclude={"kind", "read", "concurrency"}))
        self.concurrency_limit = asyncio.Semaphore(settings.concurrency or usable_cores())
        self.sandbox: Sandbox | None = None

    async def start(self, context: ScoringContext) -> None:
        self.sandbox = await create_sandbox(self.config.sandbox.kind)

    async def require_program(self, program: str, *arguments: str, setting: str) -> None:
        """Raise ConfigError if a required program does not run in the sandbox."""
        result = await self.run(SandboxJob([program, *arguments], readable_paths=self.readable_paths))
        if not result.ok:
            raise ConfigError(f"{setting} does not run in the sandbox: {result.output.strip()[-300:]}")

    async def run(self, job: SandboxJob) -> SandboxResult:
        if self.sandbox is None:
            self.sandbox = await create_sandbox(self.config.sandbox.kind)
        return await self.sandbox.run(job, self.limits)


class CommandReward(SandboxedRule[CommandRewardConfig]):
    def __init__(self, config: CommandRewardConfig) -> None:
        super().__init__(config)
        self.files: dict[str, str] = {}
        for path in config.files:
            try:
                self.files[path.name] = path.expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"reward.files: {path} cannot be read as text: {error}") from error
        # A changed script gives the rule a new version.
        self.version = hashlib.sha256(f"{self.version} {self.files}".encode()).hexdigest()[:8]
        program, *arguments = config.command
        self.script = program.removeprefix("./") if program.removeprefix("./") in self.files else None
        self.command = [f"./{self.script}", *arguments] if self.script else config.command

    async def start(self, context: ScoringContext) -> None:
        await super().start(context)
        script = 'command -v "$0" || { echo "there is no $0"; exit 1; }'
        await self.require_program("sh", "-c", script, self._program(), setting="reward.command")

    def _program(self) -> str:
        """Return the program to run in the sandbox: the command, or the script's interpreter."""
        if self.script is None:
            return self.command[0]
        first = self.files[self.script].partition("\n")[0]
        if not first.startswith("#!") or not first[2:].split():
            raise ConfigError(
                f"reward.command: the first line of {self.script} names no interpreter; add one, such as "
                f"#!/bin/sh, or use the command [sh, {self.script}]"
            )
        return first[2:].split()[0]

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        config = self.config
        answer = extract_answer(transcript.final_text, part=config.part) or ""
        files = {**self.files, config.file: answer, "task.json": json.dumps(task.data)}
        variables = {"INSTAR_ANSWER": config.file, "INSTAR_TASK": "task.json"}
        result = await self.run(SandboxJob(self.command, files, variables, self.readable_paths))
        return self.reward(
            transcript, result.ok, reason=result.reason, output=result.output[-MAX_DETAIL_CHARS:]
        )


class TestsReward(SandboxedRule[TestsRewardConfig]):
    async def start(self, context: ScoringContext) -> None:
        await super().start(context)
        if self.config.runner == "pytest":
            await self.require_program(sys.executable, "-c", "import pytest", setting="reward.runner: pytest")

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        if not task.data:
            return []
        tests = get_expected_answers(task, self.config.tests)
        code = extract_answer(transcript.final_text, part=self.config.part) or ""
        key = secrets.token_hex(16)
        result = await self.run(self._job(code, tests, key))
        report, output = self._parse_report(result, key)
        passed, total = (report["passed"], report["total"]) if report else (0, 0)
        share = passed / total if total else 0.0
        value = share if self.config.reward == "share" else float(share == 1.0 and result.ok)
        if total:
            summary = f"{passed} of {total} tests passed"
        else:
            summary = "no test was run" if report else "it exited before its tests finished"
        reason = (result.reason if result.exceeded_limit or not total else "") or (
            "" if value == 1.0 else summary
        )
        return self.reward(
            transcript, value, passed=passed, total=total, reason=reason, output=output[-MAX_DETAIL_CHARS:]
        )

    def _parse_report(self, result: SandboxResult, key: str) -> tuple[dict[str, int] | None, str]:
        """Return the test report, or None if there is none, and the output before the report."""
        if isinstance(self.config.runner, list):
            return {"passed": int(result.ok), "total": 1}, result.output
        output, marker, report = result.output.rpartition(f"\n{key} ")
        if not marker or result.exceeded_limit is not None:
            return None, result.output
        return json.loads(report.splitlines()[0]), output

    def _job(self, code: str, tests: list[str], key: str) -> SandboxJob:
        config = self.config
        files = {config.file: code}
        match config.runner:
            case "python":
                command = [sys.executable, "-B", "run_tests.py", config.file]
                runner = RUNNER_SCRIPT.read_text(encoding="utf-8")
                files |= {"run_tests.py": runner, "tests.json": json.dumps(tests), "key": key}
            case "pytest":
                options = ["-B", "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
                command = [sys.executable, *options, "-p", "instar_report", config.tests_file]
                plugin = PYTEST_PLUGIN.read_text(encoding="utf-8")
                files |= {config.tests_file: "\n".join(tests), "instar_report.py": plugin, "key": key}
            case _:
                command = config.runner
                files[config.tests_file] = "\n".join(tests)
        return SandboxJob(command, files, readable_paths=self.readable_paths)
