"""Config sections for rules that score a final answer, and for the sandbox that runs model-written code. A
rule that needs a field of the task gives no reward to sessions without a task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from instar.config.base import PositiveInt, Seconds, Section

CheckTimeout = Annotated[
    float,
    Field(
        gt=0,
        description="Limit on the CPU time of a check, in seconds. Beyond it, the answer counts as wrong.",
    ),
]
ScorerName = Annotated[str, Field(description="Name under which the scorer's rewards are recorded.")]
AnswerMarker = Annotated[
    str | None,
    Field(
        description="Use only the text after the last occurrence of this marker in the final text. If the "
        "marker is missing, the reward is 0."
    ),
]
ExpectedMarker = Annotated[
    str | None,
    Field(description="Use only the text after the last such marker in the expected answer (GSM8K: `####`)."),
]


class SandboxConfig(Section):
    """The sandbox for model-written code. If the machine does not support it, the run does not start."""

    kind: Literal["auto", "bubblewrap", "landlock"] = "auto"
    """Sandbox to use. `auto`: bubblewrap if it works, else Landlock with seccomp."""
    seconds: Seconds = 10.0
    """Timeout for one job, in seconds."""
    memory_mb: PositiveInt = 1024
    """Memory limit in MiB, both for all processes of a job together and for the address space of each one."""
    processes: PositiveInt = 64
    """Maximum number of concurrent processes and threads."""
    output_kb: PositiveInt = 1024
    """Maximum size of the output, in KiB."""
    files_mb: PositiveInt = 64
    """Maximum total size of written files, in MiB."""
    network: bool = False
    """Allow network access."""
    read: list[Path] = []
    """Files and folders that a job may read, besides system programs and the Python installation."""
    concurrency: PositiveInt | None = None
    """Maximum number of sessions to score at the same time. Default: the number of cores."""


class ExactRewardConfig(Section):
    """Rewards 1 if the answer is one of the expected texts, else 0."""

    type: Literal["exact"]
    name: ScorerName = "exact"
    expected: str = "answer"
    """Field of the task with the expected answer or a list of answers; `a.b` is field `b` of field `a`."""
    expected_after: ExpectedMarker = None
    after: AnswerMarker = None
    part: Literal["whole", "last_line", "last_number", "last_block"] = "whole"
    """Part of the final text to score. `last_block`: the last fenced code block, or else the whole text."""
    strip: bool = True
    """Ignore leading and trailing whitespace."""
    ignore_case: bool = False
    """Ignore case."""
    ignore_whitespace: bool = False
    """Treat any run of whitespace as one space."""


class NumericRewardConfig(Section):
    """Rewards 1 if the last number in the final text is an expected number, else 0. Accepts numbers such as
    `1,234.5`, `$3`, `2/3` and `1e-3`."""

    type: Literal["numeric"]
    name: ScorerName = "numeric"
    expected: str = "answer"
    """Field of the task with the expected number or a list of numbers."""
    expected_after: ExpectedMarker = None
    after: AnswerMarker = None
    tolerance: float = 1e-6
    """Maximum absolute difference."""
    relative: float = 0.0
    """Maximum difference relative to the expected number; the larger of the two tolerances applies."""


class MathRewardConfig(Section):
    """Rewards 1 if the answer is mathematically equal to the expected answer (math-verify: LaTeX, fractions,
    sets, equations), else 0."""

    type: Literal["math"]
    name: ScorerName = "math"
    expected: str = "answer"
    """Field of the task with the expected answer or a list of answers."""
    expected_after: ExpectedMarker = None
    after: AnswerMarker = None
    seconds: CheckTimeout = 5.0


class JsonSchemaRewardConfig(Section):
    """Rewards 1 if the answer is JSON that matches a schema, else 0."""

    type: Literal["json_schema"]
    name: ScorerName = "json_schema"
    against: dict[str, Any] | None = None
    """The JSON schema. Default: the schema in the task field named by `expected`."""
    expected: str = "schema"
    """Field of the task with the schema."""
    after: AnswerMarker = None
    part: Literal["whole", "last_line", "last_block"] = "last_block"
    """Part of the final text to score. `last_block`: the last fenced code block, or else the whole text."""
    seconds: CheckTimeout = 2.0


class RegexRewardConfig(Section):
    """Rewards 1 if the answer matches a Python regular expression, else 0."""

    type: Literal["regex"]
    name: ScorerName = "regex"
    pattern: str | None = None
    """The regular expression. Default: the one in the task field named by `expected`."""
    expected: str = "pattern"
    """Field of the task with the regular expression."""
    how: Literal["search", "fullmatch"] = "search"
    """`search`: any part of the answer must match. `fullmatch`: the whole answer must match."""
    ignore_case: bool = False
    """Ignore case."""
    after: AnswerMarker = None
    part: Literal["whole", "last_line", "last_block"] = "whole"
    """Part of the final text to score. `last_block`: the last fenced code block, or else the whole text."""
    seconds: CheckTimeout = 1.0


class CommandRewardConfig(Section):
    """Rewards 1 if a command that checks the answer in the sandbox exits with code 0, else 0."""

    type: Literal["command"]
    name: ScorerName = "command"
    command: Annotated[list[str], Field(min_length=1)]
    """Program and arguments. The program may be a script in `files`. The environment variable INSTAR_ANSWER
    contains the path of a file with the answer, and INSTAR_TASK the path of a file with the task as JSON."""
    files: list[Path] = []
    """Text files, such as scripts, that are copied to the command's working directory."""
    file: str = "answer.txt"
    """Name of the file with the answer in the command's working directory."""
    part: Literal["whole", "last_line", "last_block"] = "whole"
    """Part of the final text to score. `last_block`: the last fenced code block, or else the whole text."""
    sandbox: SandboxConfig = SandboxConfig()


class TestsRewardConfig(Section):
    """Rewards code in the answer that passes unit tests. The code and the tests run in sandboxes."""

    type: Literal["tests"]
    name: ScorerName = "tests"
    tests: str = "tests"
    """Field of the task with the tests: one text, or a list with one text per test."""
    part: Literal["whole", "last_block"] = "last_block"
    """Part of the final text with the code. `last_block`: the last fenced code block, or else all text."""
    runner: Literal["python", "pytest"] | list[str] = "python"
    """How the tests are run. `python`: in the namespace of the answer; each text is a test, or defines test
    functions `test_*`. `pytest`: runs `tests_file`, whose tests import `answer`. A list is a custom command.
    It runs in the folder that contains `file` and `tests_file`, exits with code 0 if all tests passed, and
    needs `isolate: false`."""
    isolate: bool = True
    """Run the answer in its own sandbox. The tests run in a second sandbox, call the answer, and get its
    results as data, so the answer cannot read or change the tests. `false`: the tests run in the same process
    as the answer, which can then forge the result."""
    reward: Literal["share", "all"] = "all"
    """`share`: the fraction of tests that passed. `all`: 1 if all tests passed, else 0."""
    file: str = "answer.py"
    """Name of the file with the code."""
    tests_file: str = "test_answer.py"
    """Name of the file with the tests, for `pytest` and custom commands."""
    sandbox: SandboxConfig = SandboxConfig()

    @model_validator(mode="after")
    def _check_runner(self) -> Self:
        if self.isolate and isinstance(self.runner, list):
            raise ValueError(
                f"isolate: must be false with the custom command {self.runner} as runner, which needs the "
                "answer and the tests in one sandbox. The answer can then read the tests and forge the "
                "result; to prevent this, use the runner python or pytest"
            )
        if self.reward == "share" and isinstance(self.runner, list):
            raise ValueError(
                "reward: must be 'all' with a custom command as runner, which only reports an exit code"
            )
        return self


RuleSection = (
    ExactRewardConfig
    | NumericRewardConfig
    | MathRewardConfig
    | JsonSchemaRewardConfig
    | RegexRewardConfig
    | CommandRewardConfig
    | TestsRewardConfig
)
