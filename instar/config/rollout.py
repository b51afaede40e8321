"""Tasks, agents, rewards and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from instar.config.base import NonNegative, PluginConfig, Positive, Seconds, Section
from instar.config.judge import JudgeRewardConfig
from instar.config.rules import RuleSection
from instar.config.tasks import (
    BfclTasksConfig,
    Gsm8kTasksConfig,
    HumanEvalTasksConfig,
    ReasoningGymTasksConfig,
    TextArenaTasksConfig,
    VerifiersTasksConfig,
)


class JsonlTasksConfig(Section):
    """Tasks from a file with one JSON object per line."""

    type: Literal["jsonl"]
    path: Path
    """Path of the file."""
    id_field: str | None = None
    """Field with the id of a task. Default: the line number."""
    limit: Positive | None = None
    """Maximum number of tasks; the first tasks are used."""


class PythonTasksConfig(Section):
    """Tasks from a Python callable that returns an iterable of dicts."""

    type: Literal["python"]
    function: str
    """Function that returns the tasks, as `package.module:function`."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""


TasksConfig = Annotated[
    JsonlTasksConfig
    | PythonTasksConfig
    | ReasoningGymTasksConfig
    | Gsm8kTasksConfig
    | TextArenaTasksConfig
    | VerifiersTasksConfig
    | HumanEvalTasksConfig
    | BfclTasksConfig
    | PluginConfig,
    Field(discriminator="type"),
]


class FunctionAgentConfig(Section):
    """Runs an async Python function `agent(task, session)`; see docs/concepts.md."""

    type: Literal["function"]
    function: str
    """Function to run, as `package.module:function`."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""


class CommandAgentConfig(Section):
    """Runs any program, with OPENAI_BASE_URL, OPENAI_API_KEY, and the task as JSON in INSTAR_TASK."""

    type: Literal["command"]
    command: list[str]
    """Program and arguments; `{field}` is replaced with that field of the task."""
    env: dict[str, str] = {}
    """Additional environment variables."""
    cwd: Path | None = None
    """Working folder. Default: the folder that contains the YAML file."""


AgentConfig = Annotated[FunctionAgentConfig | CommandAgentConfig | PluginConfig, Field(discriminator="type")]


class SamplingConfig(Section):
    """Sampling parameters of every call of a channel. They override the agent's own parameters."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass for nucleus sampling."""


class RolloutConfig(Section):
    """Settings for running agents on tasks."""

    tasks: TasksConfig
    """Tasks to train on."""
    agent: AgentConfig
    """Agent that solves the tasks."""
    group_size: Positive = 8
    """Number of sessions per task."""
    concurrency: Positive = 32
    """Maximum number of concurrent sessions."""
    timeout: Seconds = 300.0
    """Timeout of one session, in seconds."""
    retries: NonNegative = 2
    """Number of retries after a transient error, with exponential backoff and jitter."""
    group_policy: Literal["keep", "refill", "drop"] = "keep"
    """How a failed session of a group is handled: train on the others, run it again, or drop the group."""
    refills: NonNegative = 2
    """Maximum number of additional sessions for each failed session under `refill`."""
    failed_reward: float | None = None
    """Reward of a failed session; `null` excludes the session from the mean of its group."""
    shuffle: bool = True
    """Shuffle the tasks with the run's seed."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters of the train channel."""


class AgentRewardConfig(Section):
    """Uses the reward that the agent returns or sends when it completes its session."""

    type: Literal["agent"] = "agent"


class RuleRewardConfig(Section):
    """Scores sessions with a Python rule: `rule(task, transcript) -> float`."""

    type: Literal["rule"]
    function: str | None = None
    """Function to call, as `package.module:function`. Default: the scorer of the task set, if it has one."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""
    name: str | None = None
    """Name under which its rewards are recorded. Default: `function`."""
    thread: bool = True
    """Run a function that is not async in a thread, so that it blocks nothing and `scoring.deadline` applies.
    `false`: run it in the main thread, for packages that use signals for timeouts."""


RewardConfig = Annotated[
    AgentRewardConfig | RuleRewardConfig | RuleSection | JudgeRewardConfig | PluginConfig,
    Field(discriminator="type"),
]


class EvalMode(SamplingConfig):
    """The agent's arguments and the sampling parameters of one evaluation mode."""

    agent_args: dict[str, Any] = {}
    """Keyword arguments of the agent's function in this mode. They override those of `rollout.agent`."""


class EvalConfig(Section):
    """Evaluation on held-out tasks, on the `val` channel."""

    tasks: TasksConfig
    """Tasks to evaluate on."""
    modes: dict[str, EvalMode] = {"greedy": EvalMode(temperature=0.0), "sampled": EvalMode()}
    """Evaluation modes by name."""
    every: Positive | None = None
    """Number of versions between two evaluations during training. Default: no evaluations during training."""
    at_start: bool = True
    """Evaluate before training."""
    at_end: bool = True
    """Evaluate after training."""
