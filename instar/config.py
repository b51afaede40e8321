"""One YAML file describes a run. The docstring under a field is its documentation.

Sections that have variants are unions on ``type``; the same word keys the class in `registry`.
This module imports neither torch nor any variant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

DType = Literal["auto", "bf16", "fp32"]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Unit = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the config: frozen, no unknown keys, documented by docstrings."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def _unless_named(word: str) -> BeforeValidator:
    """A section that says no `type` is of this one."""

    def fill(value: Any) -> Any:
        return (
            {"type": word, **cast(Any, value)} if isinstance(value, dict) and "type" not in value else value
        )

    return BeforeValidator(fill)


class PluginConfig(Section):
    """A variant from another package; see docs/concepts.md."""

    type: Literal["plugin"]
    name: str
    """Its entry point's name in the group `instar.<kind>`, or `package.module:Class`."""
    args: dict[str, Any] = {}
    """Settings of its own; it is given this section."""
    python: str | None = None
    """Interpreter to run it with, where it is a role. Default: the running one."""


class ModelConfig(Section):
    """Which model is served and trained."""

    name: str = "smollm2-135m"
    """`smollm2-135m` (from the package registry), a Hugging Face id, or a folder (`./folder`)."""
    dtype: DType = "auto"
    """Of the base weights. `auto` is bf16 where the processor computes it fast, else fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU when there is one."""
    max_context: Positive = 2048
    """Longest prompt + reply, in tokens."""
    tool_format: Literal["auto", "template", "generic"] = "auto"
    """How tools reach the model: through its own chat template, or by the generic format of
    docs/concepts.md. `auto` takes the template where it knows tools."""


class SqliteStoreConfig(Section):
    """The embedded store: one file, one writer per process."""

    type: Literal["sqlite"] = "sqlite"
    path: Path | None = None
    """The database file. Default: `store.db` in the run's folder."""


class RedactConfig(Section):
    """What is cut out of messages before they are stored. A call that held such a span is not trained on."""

    secrets: bool = True
    """Cut out what looks like an API key, a token or a private key."""
    patterns: list[str] = []
    """Further regular expressions; what they match is cut out."""


class GatewayConfig(Section):
    """The server that agents talk to."""

    host: str = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 picks a free port."""
    request_timeout: Seconds = 600.0
    """Deadline of one model call."""
    max_body: Positive = 16 * 1024 * 1024
    """Largest request body, in bytes."""
    max_sessions_in_memory: Positive = 1024
    """Message graphs kept at hand; older ones are read back from the store when needed."""
    max_in_flight: Positive = 1024
    """Model calls at once; one more is answered with 429."""
    max_messages: Positive = 20_000
    """Most messages of one request."""
    max_tools: Positive = 2048
    """Most tools of one request."""
    max_header: Positive = 64 * 1024
    """Largest request line and headers, in bytes."""
    read_timeout: Seconds = 60.0
    """Deadline for a request's headers and body to arrive, and for a client to take the end of a stream."""
    idle_timeout: Seconds = 1800.0
    """A live session without a call for so long is closed."""
    redact: RedactConfig = RedactConfig()


class LocalEngineConfig(Section):
    """Samples with torch, in a process of its own."""

    type: Literal["local"] = "local"
    max_batch: Positive = 64
    """Most replies generated at once."""
    prefill_tokens: Positive = 512
    """Most prompt tokens computed in one step beside the decoding ones."""
    kv_tokens: Positive | None = None
    """Tokens the KV cache holds, live and kept for reuse. Default: by the memory there is."""
    threads: Positive | None = None
    """CPU threads of torch. Default: the cores there are, shared with a trainer that runs beside it."""
    count: Positive = 1
    """How many of them to run; the gateway spreads the sessions over them."""
    python: str | None = None
    """Interpreter to run this role with. Default: the running one."""


class ScriptedEngineConfig(Section):
    """Plays given replies. For tests, and for trying the gateway without a model."""

    type: Literal["scripted"] = "scripted"
    replies: list[str] = ["Hello from the scripted engine."]
    """Replies to play, in order for each conversation turn, over again when they run out."""
    function: str | None = None
    """`package.module:function` called with (prompt text, seed) for each reply, instead of `replies`."""
    delay: Annotated[float, Field(ge=0)] = 0.0
    """Seconds to wait before each token."""
    count: Positive = 1
    """How many of them to run; the gateway spreads the sessions over them."""
    python: str | None = None
    """Interpreter to run this role with. Default: the running one."""


class UpstreamEngineConfig(Section):
    """A model that someone else serves, for agents to be recorded. Nothing is trained on a call unless the
    provider returns its token ids and logprobs."""

    type: Literal["upstream"] = "upstream"
    base_url: str
    """As its own clients are given it: `https://api.openai.com/v1`, `https://api.anthropic.com`."""
    dialect: Literal["chat", "responses", "messages", "completions"] = "chat"
    """What it speaks. Requests in this dialect are passed on as they are, others are translated: to and from
    `chat` and `messages`."""
    also: list[Literal["chat", "responses", "messages", "completions"]] = []
    """Further dialects that it speaks at the same address."""
    api_key_env: str | None = None
    """Environment variable with its key. Default: the key the agent sent, where that is not one of ours."""
    model: str | None = None
    """The model to ask it for. Default: the one that the agent asks for."""
    token_ids: bool = False
    """Ask for token ids and logprobs, as vLLM returns them: such calls are exact, and trainable."""
    headers: dict[str, str] = {}
    """Sent with every request."""
    python: str | None = None
    """Unused: it has no process of its own."""


EngineConfig = Annotated[
    LocalEngineConfig | ScriptedEngineConfig | UpstreamEngineConfig | PluginConfig,
    Field(discriminator="type"),
]


class ModelRoute(Section):
    """What answers when an agent asks for a model by some name."""

    upstream: str | None = None
    """One of `upstreams`. Default: the run's engine."""
    trainable: bool = True
    """False: recorded, never trained on."""


class LoraConfig(Section):
    """A low-rank adapter on the base model."""

    rank: Positive = 16
    """Rank of the update."""
    alpha: float = 32.0
    """The update is scaled by alpha / rank."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the modules to adapt."""


class LocalBackendConfig(Section):
    """Trains with torch, in the trainer's process."""

    type: Literal["local"] = "local"
    lora: LoraConfig | None = LoraConfig()
    """The adapter; `null` trains all weights."""
    micro_batch_tokens: Positive = 8192
    """Most distinct tokens in one forward and backward pass. A prefix that samples share counts once."""
    gradient_checkpointing: bool = False
    """Trade time for memory."""
    threads: Positive | None = None
    """CPU threads of torch. Default: the cores there are, shared with an engine that runs beside it."""
    python: str | None = None
    """Interpreter to run the trainer with. Default: the running one."""


BackendConfig = Annotated[
    LocalBackendConfig | PluginConfig, Field(discriminator="type"), _unless_named("local")
]


class AdamConfig(Section):
    """The optimizer. Every field is passed explicitly to every backend."""

    lr: Annotated[float, Field(gt=0)] = 2e-4
    """Learning rate after warm-up."""
    beta1: Unit = 0.9
    """Decay of the first moment."""
    beta2: Unit = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    grad_clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 does not clip."""


class LossConfig(Section):
    """What is minimised: a plain sum over trained tokens."""

    name: Literal["importance_sampling", "ppo", "cispo", "cross_entropy"] = "importance_sampling"
    """The loss."""
    clip_low: float | None = None
    """Lowest importance ratio. Default: ppo 0.8, cispo 0."""
    clip_high: float | None = None
    """Highest importance ratio. Default: ppo 1.2, cispo 4."""


class AdvantageConfig(Section):
    """From rewards to advantages, within a group."""

    estimator: Literal["grpo", "grpo_no_std", "rloo", "running"] = "grpo"
    """`grpo`: (r - mean) / std; `grpo_no_std`: r - mean; `rloo`: r - mean of the others;
    `running`: r - a running mean over sessions, for groups of one."""
    normalize: Literal["batch_tokens", "batch_sessions", "session_tokens", "none"] = "batch_sessions"
    """What a step's token sum is divided by: all trained tokens of the step, the sessions of the step, each
    session's own tokens and then the sessions, or nothing."""
    decay: Unit = 0.95
    """How slowly the `running` baseline moves."""


class TrainerConfig(Section):
    """The background trainer."""

    mode: Literal["async", "sync"] = "async"
    """`async`: rollouts run ahead by at most `max_staleness` versions. `sync`: strict alternation,
    reproducible."""
    steps: Positive = 20
    """Optimizer steps of the run."""
    seconds: Seconds | None = None
    """Stop after this much time of training, evaluation apart, if `steps` is not reached before."""
    groups_per_step: Positive = 6
    """Groups consumed by one step."""
    max_staleness: NonNegative | None = None
    """Versions that a trained token may be behind; older samples are dropped with that reason. Default: 1
    in `async` mode; `sync` mode allows only 0."""
    loss: LossConfig = LossConfig()
    adam: AdamConfig = AdamConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    warmup_steps: NonNegative = 3
    """Steps over which the learning rate rises to its value."""
    schedule: Literal["constant", "linear"] = "constant"
    """What the learning rate does after warm-up: stay, or fall towards zero at the end of `steps` or
    `seconds`, whichever is nearer."""
    checkpoint_every: Positive = 1
    """Steps between two checkpoints. Steps after the last one are trained again after a crash."""
    keep_checkpoints: Positive = 2
    """Checkpoints and published artifacts kept, newest first."""
    tensorboard: bool = True
    """Write TensorBoard event files beside metrics.jsonl."""


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


class ReasoningGymTasksConfig(Section):
    """Tasks generated by reasoning-gym, scored by its own verifier (`reward: {type: rule}`)."""

    type: Literal["reasoning_gym"]
    dataset: str
    """Name of the dataset, `basic_arithmetic` for one."""
    size: Positive = 500
    """How many to generate."""
    seed: int = 0
    """Seed of the generator."""
    args: dict[str, Any] = {}
    """Further settings of the dataset."""


TasksConfig = Annotated[
    JsonlTasksConfig | PythonTasksConfig | ReasoningGymTasksConfig | PluginConfig, Field(discriminator="type")
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


RewardConfig = Annotated[AgentRewardConfig | RuleRewardConfig | PluginConfig, Field(discriminator="type")]


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


class RunConfig(Section):
    """A run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Names the run, its folder and its policy."""
    seed: int = 0
    """Seeds the order of tasks, the sampling and the adapter."""
    dir: Path | None = None
    """Folder of the run. Default: `runs/<name>` in the working folder."""
    agent_id: str = "default"
    """Which agent the recorded sessions belong to."""
    model: ModelConfig = ModelConfig()
    store: SqliteStoreConfig = SqliteStoreConfig()
    gateway: GatewayConfig = GatewayConfig()
    engine: EngineConfig = LocalEngineConfig()
    upstreams: dict[str, UpstreamEngineConfig] = {}
    """Providers beside the engine, by a name of your choice."""
    models: dict[str, ModelRoute] = {}
    """The names that agents ask for (`*` stands for anything) and what answers them; the first that fits
    counts. Default: the run's engine answers every name."""
    backend: BackendConfig = LocalBackendConfig()
    trainer: TrainerConfig = TrainerConfig()
    rollout: RolloutConfig | None = None
    """Agents to run on tasks. `instar train` needs it, `instar serve` does not."""
    reward: RewardConfig = AgentRewardConfig()
    eval: EvalConfig | None = None

    @property
    def run_dir(self) -> Path:
        return self.dir or Path("runs") / self.name

    @property
    def store_path(self) -> Path:
        return self.store.path or self.run_dir / "store.db"

    @model_validator(mode="after")
    def _staleness_fits_mode(self) -> Self:
        if self.trainer.mode == "sync" and self.trainer.max_staleness:
            given = self.trainer.max_staleness
            raise ValueError(
                f"trainer.max_staleness: given {given}; it is 0, or left out, when trainer.mode is sync"
            )
        return self

    @model_validator(mode="after")
    def _upstreams_are_known(self) -> Self:
        for name, route in self.models.items():
            if route.upstream is not None and route.upstream not in self.upstreams:
                known = ", ".join(self.upstreams) or "none"
                raise ValueError(f"models.{name}.upstream: given {route.upstream!r}; upstreams: {known}")
        return self

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> Self:
        estimator = self.trainer.advantage.estimator
        if self.rollout is not None and self.rollout.group_size == 1 and estimator != "running":
            raise ValueError(
                f"rollout.group_size: given 1; trainer.advantage.estimator {estimator!r} compares the "
                "sessions of a group, so it learns nothing from one. Use 2 or more, or 'running'"
            )
        return self

    @property
    def max_staleness(self) -> int:
        """Versions that a trained token may be behind, the default filled in."""
        if self.trainer.mode == "sync":
            return 0
        return 1 if self.trainer.max_staleness is None else self.trainer.max_staleness
