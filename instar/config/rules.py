"""Rules that score a final answer, and the sandbox that runs what a model wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from instar.config.base import Positive, Seconds, Section


class SandboxConfig(Section):
    """Where code that a model wrote runs. A machine that has none refuses the run at start."""

    kind: Literal["auto", "bubblewrap", "landlock"] = "auto"
    """`auto`: bubblewrap where it works, else Landlock with seccomp."""
    seconds: Seconds = 10.0
    """Deadline of one job."""
    memory_mb: Positive = 1024
    """Of all its processes together; also the address space of each."""
    processes: Positive = 64
    """Most processes and threads."""
    output_kb: Positive = 1024
    """Most output."""
    files_mb: Positive = 64
    """Most that it may write to files."""
    network: bool = False
    """Whether it may reach the network."""
    read: list[Path] = []
    """Files and folders that it may read, besides the system's programs and this Python."""
    concurrency: Positive | None = None
    """Most jobs at once. Default: one per core."""


class ExactRewardConfig(Section):
    """1 if the answer is the expected text, else 0."""

    type: Literal["exact"]
    name: str = "exact"
    """What its rewards are known by."""
    expected: str = "answer"
    """The task's field with the right answer, or a list of them; `a.b` is field `b` of field `a`."""
    expected_after: str | None = None
    """Take only what stands after the last such marker in that field: `####` for GSM8K."""
    after: str | None = None
    """Take only what stands after the last such marker in the final text; without the marker it is wrong."""
    part: Literal["whole", "last_line", "last_number", "last_block"] = "whole"
    """Which part of the final text is the answer. `last_block`: the last fenced code block."""
    strip: bool = True
    """Ignore white space at both ends."""
    ignore_case: bool = False
    """Ignore the case of letters."""
    ignore_whitespace: bool = False
    """Take any run of white space for one space."""


class NumericRewardConfig(Section):
    """1 if the last number of the final text is the expected one, else 0. `1,234.5`, `$3`, `2/3` and `1e-3`
    are numbers."""

    type: Literal["numeric"]
    name: str = "numeric"
    """What its rewards are known by."""
    expected: str = "answer"
    """The task's field with the right number, or a list of them."""
    expected_after: str | None = None
    """Take only what stands after the last such marker in that field: `####` for GSM8K."""
    after: str | None = None
    """Take only what stands after the last such marker in the final text; without the marker it is wrong."""
    tolerance: float = 1e-6
    """Largest difference."""
    relative: float = 0.0
    """Largest difference as a part of the expected number; the wider of the two counts."""


class MathRewardConfig(Section):
    """1 if the answer is mathematically equal to the expected one (math-verify: LaTeX, fractions, sets,
    equations), else 0."""

    type: Literal["math"]
    name: str = "math"
    """What its rewards are known by."""
    expected: str = "answer"
    """The task's field with the right answer, or a list of them."""
    expected_after: str | None = None
    """Take only what stands after the last such marker in that field: `####` for GSM8K."""
    after: str | None = None
    """Take only what stands after the last such marker in the final text; without the marker it is wrong."""
    seconds: Seconds = 5.0
    """Deadline; an answer that takes longer to understand is wrong."""


class JsonSchemaRewardConfig(Section):
    """1 if the answer is JSON that fits a schema, else 0."""

    type: Literal["json_schema"]
    name: str = "json_schema"
    """What its rewards are known by."""
    against: dict[str, Any] | None = None
    """The schema. Default: the task's own, in field `expected`."""
    expected: str = "schema"
    """The task's field with its schema."""
    after: str | None = None
    """Take only what stands after the last such marker in the final text; without the marker it is wrong."""
    part: Literal["whole", "last_line", "last_block"] = "last_block"
    """Which part of the final text is the answer. `last_block`: the last fenced code block, or the whole text
    where there is none."""
    seconds: Seconds = 2.0
    """Deadline; an answer that takes longer to check is wrong."""


class RegexRewardConfig(Section):
    """1 if the answer matches a regular expression (Python's), else 0."""

    type: Literal["regex"]
    name: str = "regex"
    """What its rewards are known by."""
    pattern: str | None = None
    """The expression. Default: the task's own, in field `expected`."""
    expected: str = "pattern"
    """The task's field with its expression."""
    how: Literal["search", "fullmatch"] = "search"
    """Anywhere in the answer, or all of it."""
    ignore_case: bool = False
    """Ignore the case of letters."""
    after: str | None = None
    """Take only what stands after the last such marker in the final text; without the marker it is wrong."""
    part: Literal["whole", "last_line", "last_block"] = "whole"
    """Which part of the final text is the answer."""
    seconds: Seconds = 1.0
    """Deadline; an answer that takes longer to match is wrong."""


class CommandRewardConfig(Section):
    """1 if a command that is given the answer ends with exit code 0, else 0. It runs in the sandbox."""

    type: Literal["command"]
    name: str = "command"
    """What its rewards are known by."""
    command: Annotated[list[str], Field(min_length=1)]
    """Program and arguments. INSTAR_ANSWER names the file with the answer, INSTAR_TASK the task's as JSON."""
    files: list[Path] = []
    """Text files, a script for one, that are put into the folder the command runs in."""
    file: str = "answer.txt"
    """Name of the file with the answer, in the folder the command runs in."""
    part: Literal["whole", "last_line", "last_block"] = "whole"
    """Which part of the final text is the answer. `last_block`: the last fenced code block."""
    sandbox: SandboxConfig = SandboxConfig()


class TestsRewardConfig(Section):
    """Unit tests of the code in the answer. They run in the sandbox."""

    type: Literal["tests"]
    name: str = "tests"
    """What its rewards are known by."""
    tests: str = "tests"
    """The task's field with its tests: a text, or a list of texts that are one test each."""
    part: Literal["whole", "last_block"] = "last_block"
    """Where the code is in the final text: in the last fenced code block, or all of it."""
    runner: Literal["python", "pytest"] | list[str] = "python"
    """`python`: the tests see the names of the answer; each text is a test, or each function `test_*` that it
    defines. `pytest`: the tests are a file beside `answer.py` and import it. A list is a command of your own,
    run beside `answer.py` and `test_answer.py`, and its exit code 0 means that all have passed."""
    reward: Literal["share", "all"] = "all"
    """The share of the tests that passed, or 1 if all did and else 0."""
    file: str = "answer.py"
    """Name of the file with the answer's code."""
    tests_file: str = "test_answer.py"
    """Name of the file with the tests, for `pytest` and for a command."""
    sandbox: SandboxConfig = SandboxConfig()

    @model_validator(mode="after")
    def _a_command_counts_no_tests(self) -> TestsRewardConfig:
        if self.reward == "share" and isinstance(self.runner, list):
            raise ValueError(
                "reward: share needs the runner python or pytest; a command has an exit code alone"
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
