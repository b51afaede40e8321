"""Config section for rewards from a model that judges sessions."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from instar.config.base import NonNegativeFloat, PositiveInt, Seconds, Section


class BudgetConfig(Section):
    """The budget that all judges of a run share. Requests that could exceed it are not sent, and the
    session's score states the reason."""

    dollars: Annotated[float, Field(gt=0)] | None = None
    """Maximum cost in US dollars. Needs `input_price` or `output_price`."""
    calls: PositiveInt | None = None
    """Maximum number of answers. Unparseable answers count too, because they also cost money."""


class SignalsConfig(Section):
    """The reward of a call, depending on what happens next; `null` gives no reward."""

    accepted: float | None = 1.0
    """Reward if the user continues from the reply or says thanks."""
    corrected: float | None = 0.0
    """Reward if the user says that the reply is wrong, or reverts its changes."""
    repeated: float | None = 0.0
    """Reward if the user asks for the same thing again."""
    tests_passed: float | None = 1.0
    """Reward if tests, a build or a check of the result passed."""
    tests_failed: float | None = 0.0
    """Reward if tests, a build or a check of the result failed."""
    tool_failed: float | None = 0.0
    """Reward if a tool call in the reply was rejected or failed."""


class JudgeRewardConfig(Section):
    """Scores sessions with a model that follows a rubric; see docs/judge.md."""

    type: Literal["judge"]
    rubric: Literal["outcome", "process", "pairwise", "followup"] = "outcome"
    """`outcome`: one score for the session. `process`: one score for each call. `pairwise`: compares the
    sessions of a group. `followup`: one score for each call, based on what happened next in the session."""
    criteria: str | None = None
    """Criteria to judge by, as free text. Default: the criteria of the rubric."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] | None = None
    """Name of the judge; its rewards are recorded under `judge:NAME`. Default: the name of the rubric."""
    endpoint: str
    """Base URL of the judge's API, for example `https://api.openai.com/v1` or `https://api.anthropic.com`.
    `self` uses the run's own model; its answers are not used for training."""
    dialect: Literal["chat", "messages"] = "chat"
    """API format of the endpoint: OpenAI's chat completions or Anthropic's messages."""
    model: str | None = None
    """Name of the judge's model. Required unless `endpoint` is `self`; must not be set then."""
    api_key_env: str | None = None
    """Environment variable with the endpoint's API key."""
    headers: dict[str, str] = {}
    """HTTP headers sent with every request."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Sampling temperature. Default: the endpoint's own default."""
    max_tokens: PositiveInt = 1024
    """Maximum length of an answer, in tokens."""
    structured: Literal["auto", "schema", "text"] = "auto"
    """How JSON answers are requested. `schema`: with `response_format`, or with a tool call for Anthropic.
    `text`: in the prompt only. `auto`: like `schema`, or like `text` if the endpoint rejects the schema."""
    votes: PositiveInt = 1
    """Number of answers to each question. The reward is their mean. `followup` takes the most frequent
    signal, and gives no reward on a tie; `pairwise` counts each answer as a comparison."""
    scale: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest score that `outcome` and `process` ask for. Rewards are rescaled to 0..1."""
    pairs: PositiveInt = 16
    """Maximum number of pairs per group that `pairwise` compares, each in both orders. If this is too few to
    connect all sessions, more pairs are compared."""
    signals: SignalsConfig = SignalsConfig()
    """The rewards that `followup` gives."""
    max_prompt_chars: Annotated[int, Field(ge=1000)] = 60_000
    """Maximum length of a question without the rubric, in characters. Longer questions are shortened in the
    middle or split."""
    timeout: Seconds = 30.0
    """Timeout for one answer, in seconds. Must not exceed `scoring.deadline`."""
    concurrency: PositiveInt = 32
    """Maximum number of concurrent requests."""
    input_price: NonNegativeFloat = 0.0
    """Price of a million input tokens, in US dollars."""
    output_price: NonNegativeFloat = 0.0
    """Price of a million output tokens, in US dollars."""
    budget: BudgetConfig = BudgetConfig()

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.endpoint == "self":
            for field in ("model", "api_key_env"):
                if (value := getattr(self, field)) is not None:
                    raise ValueError(f"{field}: must not be set with `endpoint: self`, got {value!r}")
            if self.dialect != "chat":
                raise ValueError(f"dialect: must be 'chat' with `endpoint: self`, got {self.dialect!r}")
        elif self.model is None:
            raise ValueError("model: required unless `endpoint` is `self`")
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(
                f"temperature: must be above 0 with {self.votes} votes, which would otherwise all be equal"
            )
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale: the first score must be lower than the second, got {list(self.scale)}")
        if self.budget.dollars is not None and not (self.input_price or self.output_price):
            raise ValueError("budget.dollars: needs input_price or output_price to compute the cost")
        rubrics_by_field = {"pairs": ("pairwise",), "signals": ("followup",), "scale": ("outcome", "process")}
        for field, rubrics in rubrics_by_field.items():
            is_set = getattr(self, field) != type(self).model_fields[field].default
            if is_set and self.rubric not in rubrics:
                raise ValueError(f"{field}: not used by the rubric {self.rubric!r}; remove it")
        return self
