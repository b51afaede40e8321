"""A model that judges sessions."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from instar.config.base import Positive, Seconds, Section

Price = Annotated[float, Field(ge=0)]


class BudgetConfig(Section):
    """What a run may spend on judges, all of them together. A session beyond it is not judged, and its score
    says why."""

    dollars: Annotated[float, Field(gt=0)] | None = None
    """Needs `input_price` and `output_price`."""
    calls: Positive | None = None
    """Answers, of any kind: those that could not be read are paid for too."""


class SignalsConfig(Section):
    """What each thing that may happen next is worth to the call before it; `null` gives no reward."""

    accepted: float | None = 1.0
    """The user goes on from the reply, or thanks for it."""
    corrected: float | None = 0.0
    """The user says what is wrong with it, or undoes it."""
    repeated: float | None = 0.0
    """The user asks for the same again."""
    tests_passed: float | None = 1.0
    """Tests, a build or a check that ran on it passed."""
    tests_failed: float | None = 0.0
    """They did not."""
    tool_failed: float | None = 0.0
    """A tool call that the reply made was refused or failed."""


class JudgeRewardConfig(Section):
    """A model that reads a session and scores it by a rubric; see docs/judge.md."""

    type: Literal["judge"]
    rubric: Literal["outcome", "process", "pairwise", "followup"] = "outcome"
    """`outcome`: one score of the whole session. `process`: one of every call. `pairwise`: the sessions of a
    group against each other. `followup`: of every call, by what happened next in the session."""
    criteria: str | None = None
    """What to judge by, in your own words. Default: the rubric's."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] | None = None
    """Its rewards are known as `judge:NAME`. Default: the rubric."""
    endpoint: str
    """Base URL as its own clients are given it: `https://api.openai.com/v1`, `https://api.anthropic.com`.
    `self` asks the run's own model, whose answers are not trained on."""
    dialect: Literal["chat", "messages"] = "chat"
    """What the endpoint speaks: OpenAI's chat completions, or Anthropic's messages."""
    model: str | None = None
    """The model to ask for. Default, and only, with `endpoint: self`: the run's own."""
    api_key_env: str | None = None
    """Environment variable with the endpoint's key."""
    headers: dict[str, str] = {}
    """Sent with every request."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Default: the endpoint's own."""
    max_tokens: Positive = 1024
    """Longest answer."""
    structured: Literal["auto", "schema", "text"] = "auto"
    """How an answer in JSON is asked for. `schema`: by `response_format`, or as a tool call of Anthropic's.
    `text`: in words alone. `auto`: by schema, in words where the endpoint refuses that."""
    votes: Positive = 1
    """Answers to each question; the reward is their mean."""
    scale: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest score that `outcome` and `process` ask for; rewards are brought to 0..1."""
    pairs: Positive = 16
    """Most pairs of a group that `pairwise` compares, each in both orders; no fewer than connect them all."""
    signals: SignalsConfig = SignalsConfig()
    """Of `followup`."""
    max_prompt_chars: Annotated[int, Field(ge=1000)] = 60_000
    """Longest question, rubric aside. What is longer is cut in the middle, or asked about in parts."""
    timeout: Seconds = 30.0
    """Deadline of one answer."""
    concurrency: Positive = 32
    """Most questions under way at once."""
    input_price: Price = 0.0
    """US dollars for a million tokens read."""
    output_price: Price = 0.0
    """US dollars for a million tokens written."""
    budget: BudgetConfig = BudgetConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.endpoint == "self":
            for field in ("model", "api_key_env"):
                if (given := getattr(self, field)) is not None:
                    raise ValueError(f"{field}: given {given!r}; `endpoint: self` has none")
            if self.dialect != "chat":
                raise ValueError(f"dialect: given {self.dialect!r}; `endpoint: self` speaks chat")
        elif self.model is None:
            raise ValueError("model: missing; name the model that judges")
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(f"temperature: given 0 with {self.votes} votes, which would all be the same")
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale: given {list(self.scale)}; the lowest score comes first")
        if self.budget.dollars is not None and not (self.input_price or self.output_price):
            raise ValueError("budget.dollars: given without input_price and output_price")
        return self

    @model_validator(mode="after")
    def _of_this_rubric(self) -> Self:
        used = {"pairs": ("pairwise",), "signals": ("followup",), "scale": ("outcome", "process")}
        for field, rubrics in used.items():
            given = getattr(self, field) != type(self).model_fields[field].default
            if given and self.rubric not in rubrics:
                raise ValueError(f"{field}: given, but the rubric {self.rubric!r} has no use for it")
        return self
