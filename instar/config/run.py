"""The config of a run: all sections of the YAML file."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any, Self, cast

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from instar.config.backends import BackendConfig, LocalBackendConfig
from instar.config.base import Section
from instar.config.cluster import ClusterConfig, LocalClusterConfig, SyncConfig
from instar.config.data import (
    ROLLOUT,
    DataConfig,
    check_data_sources,
    count_groups,
    normalize_data,
    rename_previous_source,
)
from instar.config.engines import (
    EngineConfig,
    LocalEngineConfig,
    MixedEngineConfig,
    UpstreamEngineConfig,
    VllmEngineConfig,
)
from instar.config.live import LiveAgentConfig, LiveConfig
from instar.config.live_data import BASE_REFERENCE
from instar.config.model import GatewayConfig, ModelConfig, ModelRoute, SqliteStoreConfig, StoreConfig
from instar.config.rollout import (
    AgentRewardConfig,
    EvalConfig,
    GroupConfig,
    GroupsConfig,
    RewardConfig,
    RolloutConfig,
    ScoringConfig,
    can_score_live,
)
from instar.config.simulate import SimulateConfig
from instar.config.trainer import TrainerConfig

STORED_SETTINGS = {"is_stored": True}
"""The validation context for settings that are read from a run's folder. An earlier version may have written
them."""


def make_folder_name(name: str) -> str:
    """Return a name for a folder that is the same for no other ``name``, on any file system."""
    if re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", name):
        return name
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:32] or "agent"
    return f"{readable}.{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def _wrap_in_list(value: Any) -> Any:
    return cast(Any, value) if isinstance(value, list) else [value]


class RunConfig(Section):
    """All settings of a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run and of its policy."""
    seed: int = 0
    """Seed for the task order, sampling and the initial adapter."""
    dir: Path | None = None
    """Folder of the run. Default: `runs/<name>` in the working directory."""
    agent_id: str = "default"
    """Id of the agent that recorded sessions belong to, unless their API key belongs to a different agent."""
    agents: dict[str, LiveAgentConfig] = {}
    """Agents by the name that their API keys have (see `instar keys`), each with its `mode`."""
    model: ModelConfig = ModelConfig()
    store: StoreConfig = SqliteStoreConfig()
    """Database for sessions, rewards and training steps."""
    gateway: GatewayConfig = GatewayConfig()
    engine: EngineConfig = LocalEngineConfig()
    """Engine that samples from the model."""
    upstreams: dict[str, UpstreamEngineConfig] = {}
    """Providers to use in addition to the engine, under names of your choice that `models` refers to."""
    models: dict[str, ModelRoute] = {}
    """Routes by the model name that agents request, in which `*` matches anything. The first matching route
    is used. Requests that match no route go to the run's engine."""
    backend: BackendConfig = LocalBackendConfig()
    """Backend that trains the model."""
    trainer: TrainerConfig = TrainerConfig()
    sync: SyncConfig = SyncConfig()
    cluster: ClusterConfig = LocalClusterConfig()
    """Where the run's processes are started."""
    rollout: RolloutConfig | None = None
    """Agents to run on tasks. Required by `eval`. Without this section, the source `rollout` in `data` means
    `groups`."""
    groups: GroupsConfig | None = None
    """Groups from outside, instead of `rollout`. `instar train` accepts them by default if there is no
    `rollout`; `instar serve` only accepts them if this section is set."""
    data: Annotated[list[DataConfig], BeforeValidator(normalize_data)] = [DataConfig()]
    """Data to train on: the run's own rollouts or live traffic, exported data, or a mixture."""
    live: LiveConfig = LiveConfig()
    reward: Annotated[list[RewardConfig], BeforeValidator(_wrap_in_list)] = [AgentRewardConfig()]
    """A reward, or a list of rewards to combine with `scoring.combine`."""
    scoring: ScoringConfig = ScoringConfig()
    eval: EvalConfig | None = None
    simulate: SimulateConfig | None = None
    """Assumptions that only `instar simulate` uses."""

    @property
    def run_dir(self) -> Path:
        return self.dir or Path("runs") / self.name

    @property
    def store_path(self) -> Path:
        assert isinstance(self.store, SqliteStoreConfig)
        return self.store.path or self.run_dir / "store.db"

    @model_validator(mode="before")
    @classmethod
    def _rename_previous_settings(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context is not STORED_SETTINGS or not isinstance(data, dict):
            return data
        settings = cast(dict[str, Any], data)
        # The version that added `agents` gave `live` its present meaning.
        if "agents" in settings or "data" not in settings:
            return settings
        return {**settings, "data": [rename_previous_source(s) for s in normalize_data(settings["data"])]}

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        for name, route in self.models.items():
            if route.upstream is not None and route.upstream not in self.upstreams:
                available = ", ".join(self.upstreams) or "none"
                raise ValueError(
                    f"models.{name}.upstream: {route.upstream!r} is not in `upstreams`. "
                    f"Available: {available}"
                )
        check_data_sources(self.data)
        if self.groups is not None and self.rollout is not None:
            raise ValueError(
                "groups: cannot be combined with `rollout`, because a run either runs its agents itself or "
                "accepts groups from outside; remove one of the two sections"
            )
        if self.groups is not None and not self.has_rollout_data:
            raise ValueError(
                "groups: cannot be used, because `data` does not list the source `rollout`; add it, or "
                "remove this section"
            )
        deadline = self.scoring.deadline
        for index, section in enumerate(self.reward):
            timeouts = {
                "timeout": getattr(section, "timeout", None),
                "sandbox.seconds": getattr(getattr(section, "sandbox", None), "seconds", None),
            }
            for name, seconds in timeouts.items():
                if seconds is not None and seconds > deadline:
                    raise ValueError(
                        f"reward.{index}.{name}: must not exceed scoring.deadline ({deadline:g} seconds), "
                        f"got {seconds:g}"
                    )
        return self

    @model_validator(mode="after")
    def _check_live(self) -> Self:
        if not self.trains_on_live:
            return self
        if not self.learning_agents:
            raise ValueError(
                "data: 'live' is live traffic, and no agent has the mode learn, so there is nothing to train "
                "on; set agents.NAME.mode to learn, or use 'rollout' for the run's own rollouts, which "
                "earlier versions called 'live'"
            )
        if self.has_rollout_data:
            raise ValueError(
                "data: 'live' and 'rollout' cannot be mixed, because rollouts would become stale while "
                "versions from live data wait for their promotion; use two runs"
            )
        conflicts = {
            "trainer.loss.name: cross_entropy": self.trainer.loss.name == "cross_entropy",
            "trainer.on_collapse: rewind": self.trainer.on_collapse == "rewind",
            f"sync.every: {self.sync.every}": self.sync.every > 1,
            "eval.every": self.eval is not None and self.eval.every is not None,
            "engine.policy: merged": self._has_merged_engine,
        }
        for setting, is_set in conflicts.items():
            if is_set:
                raise ValueError(f"{setting} cannot be used with data 'live'; remove this setting")
        if self.live.resample > 1 and not any(can_score_live(section) for section in self.reward):
            raise ValueError(
                f"live.resample: got {self.live.resample}, but `reward` has no rule with a function and no "
                "judge that can score a single session, so new replies would have no reward; add one, or set "
                "live.resample to 1"
            )
        if self.model.adapter is not None and self.max_base_kl is not None:
            raise ValueError(
                "live.replay.max_base_kl: must be unset or null if model.adapter is set, because the KL is "
                "relative to the model without an adapter"
            )
        return self

    @model_validator(mode="after")
    def _check_training(self) -> Self:
        trainer, estimator = self.trainer, self.trainer.advantage.estimator
        if trainer.mode == "sync" and trainer.max_staleness:
            raise ValueError(
                "trainer.max_staleness: must be 0 or unset if trainer.mode is sync, "
                f"got {trainer.max_staleness}"
            )
        if self.sync.every > self.max_staleness + 1:
            raise ValueError(
                f"sync.every: must not exceed trainer.max_staleness + 1 ({self.max_staleness + 1}), got "
                f"{self.sync.every}, because the engines' version is up to sync.every - 1 steps old"
            )
        if self.sync.every > 1 and self.eval is not None and self.eval.every is not None:
            raise ValueError(
                f"eval.every: got {self.eval.every} with sync.every {self.sync.every}, but the engines may "
                "not serve the version to be evaluated unless sync.every is 1; set sync.every to 1, or "
                "remove eval.every"
            )
        if self.min_group_size > 1 and self.rollout is not None and self.rollout.group_size == 1:
            raise ValueError(
                "rollout.group_size: must be at least 2, got 1, because trainer.advantage.estimator "
                f"{estimator!r} compares the sessions of a group. For groups of one, use the estimator "
                "'running' or 'reward'"
            )
        if trainer.advantage.weight == 0 and trainer.reference.weight == 0:
            raise ValueError(
                "trainer.advantage.weight and trainer.reference.weight are both 0, so there is no training "
                "signal; set at least one of them above 0"
            )
        return self

    @property
    def _has_merged_engine(self) -> bool:
        """True if a vLLM server serves only one version at a time."""
        parts = self.engine.parts if isinstance(self.engine, MixedEngineConfig) else [self.engine]
        return any(isinstance(part, VllmEngineConfig) and part.policy == "merged" for part in parts)

    @property
    def group_settings(self) -> GroupConfig:
        """The settings of the run's groups from its rollout or from outside."""
        return self.rollout or self.groups or GroupsConfig()

    @property
    def min_group_size(self) -> int:
        """2 if the advantages compare the sessions of a group, else 1."""
        advantage = self.trainer.advantage
        compares_sessions = advantage.weight > 0 and advantage.estimator not in ("running", "reward")
        return 2 if compares_sessions else 1

    @property
    def has_rollout_data(self) -> bool:
        return any(source.is_rollout for source in self.data)

    @property
    def trains_on_groups(self) -> bool:
        """True if the run trains on groups of its own rollout or from outside."""
        return (self.rollout is not None or self.groups is not None) and self.has_rollout_data

    @property
    def accepts_groups(self) -> bool:
        """True if programs outside the run may open groups."""
        return self.groups is not None and self.has_rollout_data

    @property
    def learning_agents(self) -> list[str]:
        """The agents whose live sessions the run may train on."""
        return [name for name, agent in self.agents.items() if agent.mode == "learn"]

    @property
    def policy_ids(self) -> list[str]:
        """The policies that the run trains, each with steps and versions of its own. In a run that trains on
        live traffic, every learning agent has one."""
        return [self.get_policy_id(agent_id) for agent_id in self.trained_agents] or [self.name]

    @property
    def policy_id(self) -> str:
        """The only policy that the run trains. Raises ValueError if there are several."""
        (policy_id,) = self.policy_ids
        return policy_id

    def get_policy_id(self, agent_id: str) -> str:
        """Return the policy that serves the agent's live sessions: its own if the run trains on them, or the
        one with the run's name, of which a run that trains on live traffic has only version 0."""
        return f"{self.name}/{agent_id}" if agent_id in self.trained_agents else self.name

    def get_policy_dir(self, policy_id: str) -> Path:
        """Return the folder with the checkpoints and published weights of a policy."""
        _, separator, agent_id = policy_id.partition("/")
        return self.run_dir / "agents" / make_folder_name(agent_id) if separator else self.run_dir

    def select_agent(self, agent_id: str) -> Self:
        """Return the config with a single agent, so that the run trains only this agent's policy."""
        return self.model_copy(update={"agents": {agent_id: self.agents[agent_id]}})

    @property
    def trained_agents(self) -> list[str]:
        """The agents whose live sessions and corrected live replies the run trains on."""
        return self.learning_agents if self.trains_on_live else []

    @property
    def reference_label(self) -> str | None:
        """The label in the ids of the groups of `live.replay.reference`, or None if it is not used."""
        replay = self.live.replay
        if not self.trains_on_live or not replay.share or replay.reference is None:
            return None
        return BASE_REFERENCE if replay.reference_data is None else replay.reference_data.label

    @property
    def max_base_kl(self) -> float | None:
        """`live.replay.max_base_kl` with its default filled in, or None if no KL to the base is limited."""
        replay = self.live.replay
        is_default = "max_base_kl" not in replay.model_fields_set
        if not self.trains_on_live or (is_default and self.model.adapter is not None):
            return None
        return replay.max_base_kl

    @property
    def trains_on_live(self) -> bool:
        """True if the run trains on live traffic. Its versions are then candidates, which no engine serves
        before they are promoted."""
        return any(source.is_live for source in self.data)

    @property
    def has_gate(self) -> bool:
        """True if the run evaluates its candidates, and holds live sessions out of training for it."""
        return self.trains_on_live and self.live.gate.mode != "off"

    @property
    def trains(self) -> bool:
        return self.trains_on_groups or any(not source.is_rollout for source in self.data)

    def count_groups_by_source(self, steps: int) -> list[int]:
        """Return the number of groups that the first ``steps`` steps take from each source in `data`."""
        return count_groups([source.share for source in self.data], steps * self.trainer.groups_per_step)

    def count_groups(self, steps: int, source: str) -> int:
        """Return the number of groups that the first ``steps`` steps take from a source in `data`."""
        counts = zip(self.data, self.count_groups_by_source(steps), strict=True)
        return sum(count for section, count in counts if section.source == source)

    def count_rollout_groups(self, steps: int) -> int:
        return self.count_groups(steps, ROLLOUT)

    @property
    def max_staleness(self) -> int:
        """`trainer.max_staleness` in steps, with its default filled in."""
        if self.trainer.mode == "sync":
            return 0
        return 1 if self.trainer.max_staleness is None else self.trainer.max_staleness
