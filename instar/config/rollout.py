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
    """The file."""
    id_field: str | None = None
    """The field that names a task. Default: the line number."""
    limit: Positive | None = None
    """Use only the first so many."""


class PythonTasksConfig(Section):
    """Tasks from a Python callable that returns an iterable of dicts."""

    type: Literal["python"]
    function: str
    """`package.module:function`."""
    args: dict[str, Any] = {}
    """Keyword arguments for it."""


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
    """An async Python function `agent(task, session)`; see docs/concepts.md."""

    type: Literal["function"]
    function: str
    """`package.module:function`."""
    args: dict[str, Any] = {}
    """Keyword arguments for it."""


class CommandAgentConfig(Section):
    """Any program. It is given OPENAI_BASE_URL, OPENAI_API_KEY and the task as JSON in INSTAR_TASK."""

    type: Literal["command"]
    command: list[str]
    """Program and arguments; `{field}` is replaced by that field of the task."""
    env: dict[str, str] = {}
    """Further environment variables."""
    cwd: Path | None = None
    """Folder to run in. Default: the YAML file's own."""


AgentConfig = Annotated[FunctionAgentConfig | CommandAgentConfig | PluginConfig, Field(discriminator="type")]


class SamplingConfig(Section):
    """Sampling forced on every call of a channel, whatever the agent asks for."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""


class RolloutConfig(Section):
    """Runs agents on tasks."""

    tasks: TasksConfig
    """What to train on."""
    agent: AgentConfig
    """What solves them."""
    group_size: Positive = 8
    """Sessions per task."""
    concurrency: Positive = 32
    """Most sessions at once."""
    timeout: Seconds = 300.0
    """Deadline of one session."""
    retries: NonNegative = 2
    """Further attempts after a transient error, with exponential backoff and jitter."""
    group_policy: Literal["keep", "refill", "drop"] = "keep"
    """When a session of a group failed: train on the others, run it again, or drop the group."""
    refills: NonNegative = 2
    """Most further sessions per slot under `refill`."""
    failed_reward: float | None = None
    """Reward of a failed session; `null` keeps it out of its group's mean."""
    shuffle: bool = True
    """Walk through the tasks in an order drawn from the run's seed."""
    sampling: SamplingConfig = SamplingConfig()
    """Of the train channel."""


class AgentRewardConfig(Section):
    """The agent says how it did: by its return value, or on completing its session."""

    type: Literal["agent"] = "agent"


class RuleRewardConfig(Section):
    """A Python rule: `rule(task, transcript) -> float`."""

    type: Literal["rule"]
    function: str | None = None
    """`package.module:function`. Default: the task set's own scorer, where it has one."""
    args: dict[str, Any] = {}
    """Keyword arguments for it."""
    name: str | None = None
    """What its rewards are known by. Default: `function`."""
    thread: bool = True
    """Run a function that is not async in a thread, so that nobody waits for it and `scoring.deadline` holds.
    `false`: in the main thread, where alone signals can be used, as some packages do for timeouts."""


RewardConfig = Annotated[
    AgentRewardConfig | RuleRewardConfig | RuleSection | JudgeRewardConfig | PluginConfig,
    Field(discriminator="type"),
]


class EvalMode(SamplingConfig):
    """One way of evaluating."""

    agent_args: dict[str, Any] = {}
    """Keyword arguments of the agent's function in this mode, over its own."""


class EvalConfig(Section):
    """Held-out tasks, run on the `val` channel."""

    tasks: TasksConfig
    """What to evaluate on."""
    modes: dict[str, EvalMode] = {"greedy": EvalMode(temperature=0.0), "sampled": EvalMode()}
    """Ways of evaluating, by name."""
    every: Positive | None = None
    """Versions between two evaluations while training. Default: none."""
    at_start: bool = True
    """Evaluate before training."""
    at_end: bool = True
    """Evaluate after training."""
