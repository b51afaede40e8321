"""Config sections for agents, rewards, scoring and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from instar.config.base import NonNegativeInt, PluginConfig, PositiveInt, Seconds, Section
from instar.config.judge import JudgeRewardConfig
from instar.config.rules import RuleSection
from instar.config.tasks import TasksConfig


class FunctionAgentConfig(Section):
    """Runs an async Python function `agent(task, session)`; see docs/concepts.md."""

    type: Literal["function"]
    function: str
    """Function to run, as `package.module:function`."""
    args: dict[str, Any] = {}
    """Keyword arguments for the function."""


class CommandAgentConfig(Section):
    """Runs any program with OPENAI_BASE_URL, OPENAI_API_KEY and INSTAR_TASK (the task as JSON) set."""

    type: Literal["command"]
    command: list[str]
    """Program and arguments; `{field}` is replaced with that field of the task."""
    env: dict[str, str] = {}
    """Additional environment variables."""
    cwd: Path | None = None
    """Working directory of the program. Default: the folder that contains the YAML file."""


AgentConfig = Annotated[FunctionAgentConfig | CommandAgentConfig | PluginConfig, Field(discriminator="type")]


class SamplingConfig(Section):
    """Sampling parameters that override the agent's own parameters in every call."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass for nucleus sampling."""


class GroupConfig(Section):
    """The settings that groups have in common, whoever runs their sessions."""

    group_policy: Literal["keep", "refill", "drop"] = "keep"
    """How to handle a group if one of its sessions fails. `keep`: train on the other sessions. `refill`: run
    a replacement session. `drop`: drop the group."""
    refills: NonNegativeInt = 2
    """Maximum number of replacements for each failed session under `refill`."""
    failed_reward: float | None = None
    """Reward of a failed session; `null` excludes the session from training and from its group's mean."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters of the train channel."""


class GroupsConfig(GroupConfig):
    """Settings for groups that programs outside the run open with `POST /groups` and run; see
    docs/groups.md. Used instead of `rollout`."""

    deadline: Seconds = 3600.0
    """Seconds in which a session must be completed after it was opened, unless the request sets `deadline_s`.
    After that, the session fails."""


class RolloutConfig(GroupConfig):
    """Settings for running agents on tasks."""

    tasks: TasksConfig
    """Tasks to train on."""
    agent: AgentConfig
    """Agent that solves the tasks."""
    group_size: PositiveInt = 8
    """Number of sessions in a group. They all attempt the same task."""
    concurrency: PositiveInt = 32
    """Maximum number of concurrent sessions."""
    timeout: Seconds = 300.0
    """Timeout for one session, in seconds."""
    retries: NonNegativeInt = 2
    """Maximum number of retries of a session after transient errors, with exponential backoff and jitter."""
    shuffle: bool = True
    """Shuffle the tasks with the run's seed."""


class AgentRewardConfig(Section):
    """Uses the rewards that the agent returns or sends to the gateway."""

    type: Literal["agent"] = "agent"


class RuleRewardConfig(Section):
    """Scores sessions with a function `rule(task, transcript) -> float` or the task set's own scorer."""

    type: Literal["rule"]
    function: str | None = None
    """Function to call, as `package.module:function`. Default: the scorer of the task set, if it has one."""
    args: dict[str, Any] = {}
    """Keyword arguments for the function."""
    name: str | None = None
    """Name under which the rewards are recorded. Default: `function`, or `task set` without a function."""
    thread: bool = True
    """Run a function that is not async in a thread, so that it does not block other work and
    `scoring.deadline` applies. Set this to `false` for packages that implement timeouts with signals, which
    only work in the main thread."""


RewardConfig = Annotated[
    AgentRewardConfig | RuleRewardConfig | RuleSection | JudgeRewardConfig | PluginConfig,
    Field(discriminator="type"),
]


def can_score_live(section: RewardConfig) -> bool:
    """Return True if the reward can score a live session, which has no task set and no group."""
    if isinstance(section, JudgeRewardConfig):
        return section.rubric != "pairwise"
    needs_task_set = isinstance(section, RuleRewardConfig) and section.function is None
    return not isinstance(section, AgentRewardConfig) and not needs_task_set


class CombineConfig(Section):
    """Combines the rewards of a session or a call into one. Rewards are named by their scorer (`math`,
    `judge:outcome`) or their source (`human`, `judge`, `rule`, `agent` or `fallback`)."""

    how: Literal["prefer", "sum"] = "prefer"
    """`prefer`: the latest reward of the first name in `prefer` that has one. `sum`: the weighted sum."""
    prefer: list[str] = ["human", "judge", "rule", "agent", "fallback"]
    """Names of scorers or sources, in order of precedence."""
    weights: dict[str, float] = {}
    """Weight of each scorer's latest reward under `sum`, by name. Rewards without a weight are ignored."""
    veto: dict[str, float] = {}
    """Minimum reward, by name. If the latest reward is below it, the combined reward is `veto_value`."""
    veto_value: float = 0.0
    """Combined reward of a vetoed session or call."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.how == "sum" and not self.weights:
            raise ValueError("weights: required with `how: sum`, which ignores rewards without a weight")
        return self


class ScoringConfig(Section):
    """Settings for scoring ended sessions."""

    concurrency: PositiveInt = 16
    """Maximum number of concurrent attempts of each background scorer, such as a judge."""
    deadline: Seconds = 60.0
    """Timeout for one scoring attempt, in seconds."""
    retries: NonNegativeInt = 3
    """Maximum number of retries after a transient failure, with exponential backoff and jitter."""
    fallback: float | None = None
    """Reward for a session that a scorer failed to score, recorded with the source `fallback`. `null`
    excludes the session from training."""
    combine: CombineConfig = CombineConfig()


class EvalMode(SamplingConfig):
    """The agent's arguments and the sampling parameters of one evaluation mode."""

    agent_args: dict[str, Any] = {}
    """Keyword arguments for the agent's function in this mode. They override those in `rollout.agent`, whose
    `type` must be `function`."""


class EvalConfig(Section):
    """Evaluation on held-out tasks, on the `val` channel. Each task is attempted once per mode."""

    tasks: TasksConfig
    """Tasks to evaluate on."""
    modes: dict[str, EvalMode] = {"greedy": EvalMode(temperature=0.0), "sampled": EvalMode()}
    """Evaluation modes, under names of your choice."""
    every: PositiveInt | None = None
    """Number of versions between two evaluations during training. Default: no evaluations during training."""
    at_start: bool = True
    """Evaluate before training."""
    at_end: bool = True
    """Evaluate after training."""
