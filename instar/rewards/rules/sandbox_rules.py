"""Answers that are run: given to a command, or put to unit tests, in the sandbox."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import sys
from pathlib import Path
from typing import Any

from instar.config import CommandRewardConfig, SandboxConfig, TestsRewardConfig
from instar.errors import ConfigError
from instar.models import usable_cores
from instar.rewards.base import ScoringContext, Transcript
from instar.rewards.rules.answers import MAX_DETAIL_CHARS, AnswerRule, extract_answer, get_expected_answers
from instar.rewards.sandbox.base import Sandbox, SandboxJob, SandboxLimits, SandboxResult
from instar.rewards.sandbox.factory import create_sandbox
from instar.types import Reward, Task

RUNNER_SCRIPT = Path(__file__).with_name("sandbox_runner.py")
PYTEST_PLUGIN = Path(__file__).with_name("sandbox_pytest_plugin.py")


class SandboxedRule(AnswerRule):
    background = True

    def __init__(self, section: Any) -> None:
        super().__init__(section)
        config: SandboxConfig = section.sandbox
        self.kind = config.kind
        self.readable_paths = [path.expanduser() for path in config.read]
        self.limits = SandboxLimits(
            seconds=config.seconds,
            memory_mb=config.memory_mb,
            processes=config.processes,
            output_kb=config.output_kb,
            files_mb=config.files_mb,
            network=config.network,
        )
        self.concurrency_limit = asyncio.Semaphore(config.concurrency or usable_cores())
        self.sandbox: Sandbox | None = None

    async def start(self, context: ScoringContext) -> None:
        self.sandbox = await create_sandbox(self.kind)

    async def require_program(self, program: str, *arguments: str, setting: str) -> None:
        """See at start that a program which every score needs can be run in the sandbox."""
        outcome = await self.run(SandboxJob([program, *arguments], readable_paths=self.readable_paths))
        if not outcome.ok:
            raise ConfigError(f"{setting} does not run in the sandbox: {outcome.output.strip()[-300:]}")

    async def run(self, job: SandboxJob) -> SandboxResult:
        if self.sandbox is None:
            self.sandbox = await create_sandbox(self.kind)
        return await self.sandbox.run(job, self.limits)


class CommandReward(SandboxedRule):
    def __init__(self, config: CommandRewardConfig) -> None:
        super().__init__(config)
        self.config = config
        self.files = {path.name: _text(path) for path in config.files}
        # A script that changed is another rule.
        self.version = hashlib.sha256(f"{self.version} {self.files}".encode()).hexdigest()[:8]
        program, *arguments = config.command
        self.script = program.removeprefix("./") if program.removeprefix("./") in self.files else None
        self.command = [f"./{self.script}", *arguments] if self.script else config.command

    async def start(self, context: ScoringContext) -> None:
        await super().start(context)
        find = 'command -v "$0" || { echo "there is no $0"; exit 1; }'
        await self.require_program("sh", "-c", find, self._program(), setting="reward.command")

    def _program(self) -> str:
        """What the sandbox must have: the command's, or that of the first line of a script of ours."""
        if self.script is None:
            return self.command[0]
        first = self.files[self.script].partition("\n")[0]
        if not first.startswith("#!") or not first[2:].split():
            raise ConfigError(
                f"reward.command: {self.script} cannot be run, as its first line names no program "
                f"(#!/bin/sh); begin it with one, or name the program: [sh, {self.script}]"
            )
        return first[2:].split()[0]

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        config = self.config
        answer = extract_answer(transcript.final_text, part=config.part) or ""
        files = {**self.files, config.file: answer, "task.json": json.dumps(task.data)}
        named = {"INSTAR_ANSWER": config.file, "INSTAR_TASK": "task.json"}
        outcome = await self.run(SandboxJob(self.command, files, named, self.readable_paths))
        return self.reward(
            transcript, outcome.ok, reason=outcome.reason, output=outcome.output[-MAX_DETAIL_CHARS:]
        )


def _text(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward.files: {path} cannot be read as text: {error}") from error


class TestsReward(SandboxedRule):
    def __init__(self, config: TestsRewardConfig) -> None:
        super().__init__(config)
        self.config = config

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
        outcome = await self.run(self._job(code, tests, key))
        report, output = self._report(outcome, key)
        passed, total = (report["passed"], report["total"]) if report else (0, 0)
        share = passed / total if total else 0.0
        value = share if self.config.reward == "share" else float(share == 1.0 and outcome.ok)
        if total:
            failed = f"{passed} of {total} tests passed"
        else:
            failed = "no test was run" if report else "it ended before its tests did"
        reason = (outcome.reason if outcome.exceeded_limit or not total else "") or (
            "" if value == 1.0 else failed
        )
        return self.reward(
            transcript, value, passed=passed, total=total, reason=reason, output=output[-MAX_DETAIL_CHARS:]
        )

    def _report(self, outcome: SandboxResult, key: str) -> tuple[dict[str, int] | None, str]:
        """How many tests passed, of how many, if that was said, and what was printed before."""
        if isinstance(self.config.runner, list):
            return {"passed": int(outcome.ok), "total": 1}, outcome.output
        output, said, report = outcome.output.rpartition(f"\n{key} ")
        if not said or outcome.exceeded_limit is not None:
            return None, outcome.output
        return json.loads(report.splitlines()[0]), output

    def _job(self, code: str, tests: list[str], key: str) -> SandboxJob:
        config = self.config
        files = {config.file: code}
        match config.runner:
            case "python":
                command = [sys.executable, "-B", "run_tests.py", config.file]
                inside = RUNNER_SCRIPT.read_text(encoding="utf-8")
                files |= {"run_tests.py": inside, "tests.json": json.dumps(tests), "key": key}
            case "pytest":
                command = [
                    sys.executable,
                    "-B",
                    "-W",
                    "ignore",
                    "-m",
                    "pytest",
                    "-q",
                    "-p",
                    "no:cacheprovider",
                ]
                command += ["-p", "instar_report", config.tests_file]
                inside = PYTEST_PLUGIN.read_text(encoding="utf-8")
                files |= {config.tests_file: "\n".join(tests), "instar_report.py": inside, "key": key}
            case _:
                command = config.runner
                files[config.tests_file] = "\n".join(tests)
        return SandboxJob(command, files, readable_paths=self.readable_paths)
