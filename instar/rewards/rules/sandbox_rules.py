"""Rules that run in the sandbox: a command that checks the answer, or unit tests for the answer's code."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from instar.config import CommandRewardConfig, TestsRewardConfig
from instar.errors import ConfigError
from instar.models import usable_cores
from instar.rewards.base import ScoringContext, Transcript
from instar.rewards.rules import answers
from instar.rewards.rules.answers import MAX_DETAIL_CHARS, AnswerRule, extract_answer
from instar.rewards.sandbox.base import Sandbox, SandboxJob, SandboxLimits, SandboxResult
from instar.rewards.sandbox.factory import create_sandbox
from instar.types import Reward, Task

RUNNER_SCRIPT = Path(__file__).with_name("sandbox_runner.py")
PYTEST_PLUGIN = Path(__file__).with_name("sandbox_pytest_plugin.py")
ANSWER_SCRIPT = Path(__file__).with_name("sandbox_answer.py")
PACKAGE_FOLDER = Path("instar/rewards/rules")
RPC_FILES = {str(folder / "__init__.py"): "" for folder in (PACKAGE_FOLDER, *PACKAGE_FOLDER.parents[:2])} | {
    str(PACKAGE_FOLDER / name): Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in ("sandbox_rpc.py", "sandbox_proxies.py", "sandbox_client.py")
}
TESTS_EXTRA_SECONDS = 10.0
"""Tests get this much more time than the answer, so that a slow answer is stopped first."""
ConfigT = TypeVar("ConfigT", bound=answers.SandboxedConfig)


class SandboxedRule(AnswerRule[ConfigT]):
    background = True

    def __init__(self, config: ConfigT) -> None:
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

    async def run(self, job: SandboxJob, *, extra_seconds: float = 0.0) -> SandboxResult:
        if self.sandbox is None:
            self.sandbox = await create_sandbox(self.config.sandbox.kind)
        return await self.sandbox.run(job, replace(self.limits, seconds=self.limits.seconds + extra_seconds))


class CommandReward(SandboxedRule[CommandRewardConfig]):
    def __init__(self, config: CommandRewardConfig) -> None:
        super().__init__(config)
        self.files: dict[str, str] = {}
        for path in config.files:
            try:
                self.files[path.name] = path.expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"reward.files: cannot read {path}: {error}") from error
        # A changed script gives the rule a new version.
        self.version = hashlib.sha256(f"{self.version} {self.files}".encode()).hexdigest()[:8]
        program, *arguments = config.command
        self.script = program.removeprefix("./") if program.removeprefix("./") in self.files else None
        self.command = [f"./{self.script}", *arguments] if self.script else config.command

    async def start(self, context: ScoringContext) -> None:
        await super().start(context)
        program = self.command[0]
        if self.script is not None:
            first_line = self.files[self.script].partition("\n")[0]
            if not first_line.startswith("#!") or not first_line[2:].split():
                raise ConfigError(
                    f"reward.command: {self.script} has no shebang line; add one, such as #!/bin/sh, or use "
                    f"the command [sh, {self.script}]"
                )
            program = first_line[2:].split()[0]
        find_program = 'command -v "$0" || { echo "$0 was not found"; exit 1; }'
        await self.require_program("sh", "-c", find_program, program, setting="reward.command")

    async def score(self, task: Task, transcript: Transcript) -> list[Reward]:
        config = self.config
        answer = extract_answer(transcript.final_text, part=config.part) or ""
        files = {**self.files, config.file: answer, "task.json": json.dumps(task.data)}
        variables = {"INSTAR_ANSWER": config.file, "INSTAR_TASK": "task.json"}
        result = await self.run(SandboxJob(self.command, files, variables, self.readable_paths))
        return self.build_rewards(
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
        tests = answers.get_expected_answers(task, self.config.tests)
        code = extract_answer(transcript.final_text, part=self.config.part) or ""
        key = secrets.token_hex(16)
        if self.config.isolate:
            result, answer_result = await self._run_isolated(code, tests, key)
        else:
            answer_result = None
            result = await self.run(self._build_tests_job(tests, key, {self.config.file: code}))
        decisive_result = answer_result or result
        report, output = self._parse_report(decisive_result, result.output, key)
        passed, total = (report["passed"], report["total"]) if report else (0, 0)
        fraction = passed / total if total else 0.0
        value = fraction if self.config.reward == "share" else float(fraction == 1.0 and result.ok)
        if report is None or answer_result is not None:
            summary = "the answer exited before its tests finished"
        else:
            summary = f"{passed} of {total} tests passed" if total else "no tests were run"
        prefer_reason = answer_result is not None or result.exceeded_limit or not total
        reason = "" if value == 1.0 else (decisive_result.reason if prefer_reason else "") or summary
        return self.build_rewards(
            transcript, value, passed=passed, total=total, reason=reason, output=output[-MAX_DETAIL_CHARS:]
        )

    async def _run_isolated(
        self, code: str, tests: list[str], key: str
    ) -> tuple[SandboxResult, SandboxResult | None]:
        """Run the answer and its tests in separate sandboxes. Return the result of the tests, and the result
        of the answer if it exited before the tests, otherwise None. If the answer exceeds a limit, the tests
        are stopped, and the answer's result is returned twice."""
        answer_end, tests_end = socket.socketpair()
        try:
            command = [sys.executable, "-B", "run_answer.py", str(answer_end.fileno()), self.config.file]
            script = ANSWER_SCRIPT.read_text(encoding="utf-8")
            files = {"run_answer.py": script, self.config.file: code, **RPC_FILES}
            job = SandboxJob(command, files, readable_paths=self.readable_paths, channel=answer_end)
            tests_job = self._build_tests_job(tests, key, RPC_FILES, tests_end)
            answer_task = asyncio.create_task(self.run(job))
            tests_task = asyncio.create_task(self.run(tests_job, extra_seconds=TESTS_EXTRA_SECONDS))
            try:
                await asyncio.wait([answer_task, tests_task], return_when=asyncio.FIRST_COMPLETED)
                if answer_task.done() and (answer := answer_task.result()).exceeded_limit is not None:
                    return answer, answer  # the tests could only fail
                result = await tests_task
                report, _ = self._parse_report(result, result.output, key)
                return result, await answer_task if report is not None and report["lost"] else None
            finally:
                answer_task.cancel()
                tests_task.cancel()
                await asyncio.wait([answer_task, tests_task])
        finally:
            answer_end.close()
            tests_end.close()

    def _parse_report(
        self, result: SandboxResult, output: str, key: str
    ) -> tuple[dict[str, int] | None, str]:
        """Return the report and the output before it. The report is None if the tests did not finish."""
        if isinstance(self.config.runner, list):
            return {"passed": int(result.ok), "total": 1}, output
        before, marker, report = output.rpartition(f"\n{key} ")
        if not marker or result.exceeded_limit is not None:
            return None, output
        return json.loads(report.splitlines()[0]), before

    def _build_tests_job(
        self, tests: list[str], key: str, files: dict[str, str], channel: socket.socket | None = None
    ) -> SandboxJob:
        config = self.config
        descriptors = [] if channel is None else [channel.fileno()]
        match config.runner:
            case "python":
                command = [sys.executable, "-B", "run_tests.py", config.file, *map(str, descriptors)]
                runner = RUNNER_SCRIPT.read_text(encoding="utf-8")
                files = files | {"run_tests.py": runner, "tests.json": json.dumps(tests), "key": key}
            case "pytest":
                options = ["-B", "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
                command = [sys.executable, *options, "-p", "instar_report", config.tests_file]
                plugin = PYTEST_PLUGIN.read_text(encoding="utf-8")
                files = files | {config.tests_file: "\n".join(tests), "instar_report.py": plugin, "key": key}
                if descriptors:
                    files["channel"] = json.dumps([*descriptors, config.file, config.tests_file])
            case _:
                command = config.runner
                files = files | {config.tests_file: "\n".join(tests)}
        return SandboxJob(command, files, readable_paths=self.readable_paths, channel=channel)
