"""One YAML file describes a run. The docstring under a field is its documentation.

Sections that have variants are unions on ``type``; the same word keys the class in `registry`.
Nothing here imports torch or any variant.
"""

from instar.config.backends import (
    AdamConfig,
    AutoBackendConfig,
    BackendConfig,
    CloudConfig,
    CloudSection,
    LocalBackendConfig,
    LoraConfig,
    LossConfig,
    LossName,
    MintBackendConfig,
    TinkerBackendConfig,
    VerlBackendConfig,
    WeaverBackendConfig,
)
from instar.config.base import (
    DType,
    NonNegative,
    PluginConfig,
    Positive,
    Seconds,
    Section,
    Unit,
)
from instar.config.engines import (
    CloudEngineConfig,
    EngineConfig,
    LocalEngineConfig,
    ScriptedEngineConfig,
    UpstreamEngineConfig,
)
from instar.config.gateway import (
    GatewayConfig,
    ModelRoute,
    RedactConfig,
)
from instar.config.model import (
    ModelConfig,
    SqliteStoreConfig,
)
from instar.config.rollout import (
    AgentConfig,
    AgentRewardConfig,
    CommandAgentConfig,
    EvalConfig,
    EvalMode,
    FunctionAgentConfig,
    JsonlTasksConfig,
    PythonTasksConfig,
    ReasoningGymTasksConfig,
    RewardConfig,
    RolloutConfig,
    RuleRewardConfig,
    SamplingConfig,
    TasksConfig,
)
from instar.config.run import (
    RunConfig,
)
from instar.config.trainer import (
    AdvantageConfig,
    BaseReferenceConfig,
    CompletionsReferenceConfig,
    EngineReferenceConfig,
    ReferenceConfig,
    TrainerConfig,
)

__all__ = [
    "AdamConfig",
    "AdvantageConfig",
    "AgentConfig",
    "AgentRewardConfig",
    "AutoBackendConfig",
    "BackendConfig",
    "BaseReferenceConfig",
    "CloudConfig",
    "CloudEngineConfig",
    "CloudSection",
    "CommandAgentConfig",
    "CompletionsReferenceConfig",
    "DType",
    "EngineConfig",
    "EngineReferenceConfig",
    "EvalConfig",
    "EvalMode",
    "FunctionAgentConfig",
    "GatewayConfig",
    "JsonlTasksConfig",
    "LocalBackendConfig",
    "LocalEngineConfig",
    "LoraConfig",
    "LossConfig",
    "LossName",
    "MintBackendConfig",
    "ModelConfig",
    "ModelRoute",
    "NonNegative",
    "PluginConfig",
    "Positive",
    "PythonTasksConfig",
    "ReasoningGymTasksConfig",
    "RedactConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RolloutConfig",
    "RuleRewardConfig",
    "RunConfig",
    "SamplingConfig",
    "ScriptedEngineConfig",
    "Seconds",
    "Section",
    "SqliteStoreConfig",
    "TasksConfig",
    "TinkerBackendConfig",
    "TrainerConfig",
    "Unit",
    "UpstreamEngineConfig",
    "VerlBackendConfig",
    "WeaverBackendConfig",
]
