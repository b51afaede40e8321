"""Tests for bench/learning.py: episodes as token sequences, tasks and the evaluator."""

from __future__ import annotations

import asyncio
import json
import math
import re
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from instar.agents.openai_agent import OpenAIAgent
from instar.config import ModelConfig, RunConfig
from instar.errors import AgentError
from instar.record.base import Renderer
from instar.rollout.base import AgentSession
from instar.rollout.tasks import TaskSet, load_tasks
from instar.types import Json, Message, Task, ToolCall

BENCH = Path(__file__).parents[3] / "bench"
CALL = '<tool_call>{"name": "calc", "arguments": {"expression": "6 * 7"}}</tool_call>'


@pytest.fixture(scope="module")
def renderer(default_model: Path) -> Renderer:
    """The renderer of the default model."""
    return Renderer.load(default_model, ModelConfig())


class ScriptedModel:
    """Returns the replies in order, and records the prompts. Every reply ends with the stop token. The first
    token has the logprob -1, the next one -2 and so on."""

    def __init__(self, renderer: Renderer, replies: list[str]) -> None:
        (stop_id,) = renderer.encode("<|im_end|>")
        self.replies = [[*renderer.encode(reply), stop_id] for reply in replies]
        self.prompts: list[list[int]] = []
        self.limits: list[int] = []

    async def __call__(self, prompt_ids: list[int], max_tokens: int) -> Any:
        from learning_parts.episodes import SampledTokens  # pyright: ignore[reportMissingImports]

        self.prompts.append(prompt_ids)
        self.limits.append(max_tokens)
        reply = self.replies[len(self.prompts) - 1]
        return SampledTokens(reply, [-float(number) for number in range(1, len(reply) + 1)])


class ForgetfulAgent(OpenAIAgent):
    """An agent whose second call does not contain the first reply."""

    async def __call__(self, task: Json, session: AgentSession) -> float:
        for text in ("first", "second"):
            await self.complete(
                session, [{"role": "user", "content": text}, {"role": "user", "content": "?"}]
            )
        return 1.0


forgetful_agent = ForgetfulAgent()


def make_runner(config: RunConfig, renderer: Renderer, model: ScriptedModel, task: Task) -> Any:
    from learning_parts.episodes import EpisodeRunner  # pyright: ignore[reportMissingImports]

    return EpisodeRunner(config, TaskSet([task]), renderer, model)


def make_transcript(*calls: ToolCall) -> Any:
    return SimpleNamespace(final=Message(role="assistant", content="", tool_calls=list(calls)))


def make_call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(id="call", name=name, arguments=json.dumps(arguments))


# --- episodes -----------------------------------------------------------------------------------


async def test_episode_with_tool_call_is_one_sequence_with_mask(
    bench: ModuleType, renderer: Renderer
) -> None:
    model = ScriptedModel(renderer, [CALL, "The answer is 42"])
    task = Task("0", {"question": "What is 6 times 7?", "answer": 42})
    runner = make_runner(bench.TASKS["calculator"].make_config(), renderer, model, task)
    await runner.start()
    episode = await runner.run(task)
    await runner.close()
    assert episode.reward == 1.0
    assert model.limits == [44, 16]
    assert episode.prompt_ids == model.prompts[0]
    assert episode.prompt_ids + episode.completion_ids == model.prompts[1] + model.replies[1]
    tool_ids = model.prompts[1][len(model.prompts[0]) + len(model.replies[0]) :]
    assert episode.mask == [1] * len(model.replies[0]) + [0] * len(tool_ids) + [1] * len(model.replies[1])
    assert [value for value in episode.logprobs if value == -1.0] == [-1.0, -1.0]  # one for each reply
    assert [int(value < 0) for value in episode.logprobs] == episode.mask
    assert "".join(map(renderer.decode_token, tool_ids)) == (
        "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_episode_reward_comes_from_agent_if_it_returns_one(
    bench: ModuleType, renderer: Renderer
) -> None:
    model = ScriptedModel(renderer, ["6 * 7"])
    task = Task("0", {"question": "How many eggs are in 6 boxes of 7?", "final": "42"})
    runner = make_runner(bench.TASKS["gsm8k"].make_config(), renderer, model, task)
    await runner.start()
    assert (await runner.run(task)).reward == 1.0
    await runner.close()


async def test_episode_of_agent_that_rewrites_history_raises_agent_error(
    bench: ModuleType, renderer: Renderer
) -> None:
    agent = {"type": "function", "function": f"{__name__}:forgetful_agent"}
    config = RunConfig.model_validate(
        {"rollout": {"tasks": {"type": "python", "function": "unused:unused"}, "agent": agent}}
    )
    task = Task("0", {})
    runner = make_runner(config, renderer, ScriptedModel(renderer, ["one", "two"]), task)
    with pytest.raises(AgentError, match="does not continue the previous call"):
        await runner.run(task)


async def test_reply_batcher_generates_once_all_unfinished_episodes_wait(bench: ModuleType) -> None:
    from learning_parts.episodes import (  # pyright: ignore[reportMissingImports]
        ReplyBatcher,
        SampledTokens,
    )

    batches: list[list[list[int]]] = []

    def generate_batch(prompts: list[list[int]], limits: list[int]) -> list[Any]:
        batches.append(prompts)
        return [SampledTokens([*prompt, 7, 8, 9], [-0.5] * 4) for prompt in prompts]

    batcher = ReplyBatcher(generate_batch)

    async def run_episode(number: int, turns: int) -> list[int]:
        ids = [number]
        for _ in range(turns):
            await asyncio.sleep(0.001 * number)
            reply = await batcher.generate(ids, max_tokens=2)
            ids = reply.token_ids
            assert reply.logprobs == [-0.5, -0.5]
        return ids

    replies = await batcher.run_all([run_episode(1, 1), run_episode(2, 2), run_episode(3, 1)])
    assert batches == [[[1], [2], [3]], [[2, 7]]]
    assert replies == [[1, 7], [2, 7], [3, 7]]  # replies are cut at max_tokens


class VllmTrainer:
    """Generates like TRL's trainer with vLLM: a tool call for the first batch, then an answer. The logprob of
    the stop token is unknown."""

    use_vllm = True

    def __init__(self, renderer: Renderer) -> None:
        self._replies = ScriptedModel(renderer, [CALL, "The answer is 42"]).replies
        self.vllm_generation = SimpleNamespace(max_completion_length=0)
        self.limits: list[int] = []

    def _generate_single_turn(self, prompts: list[list[int]], *_: Any) -> tuple[list[Any], list[Any]]:
        self.limits.append(self.vllm_generation.max_completion_length)
        reply = self._replies[len(self.limits) - 1]
        return [reply] * len(prompts), [[-0.5] * (len(reply) - 1) + [None]] * len(prompts)


def test_trl_rollouts_with_vllm_return_logprobs_of_all_turns(bench: ModuleType, renderer: Renderer) -> None:
    pytest.importorskip("trl")
    from learning_parts.trl_worker import AgentRollouts  # pyright: ignore[reportMissingImports]

    tasks = [Task(str(number), {"question": "What is 6 times 7?", "answer": 42}) for number in range(2)]
    trainer = VllmTrainer(renderer)
    with AgentRollouts(bench.TASKS["calculator"].make_config(), TaskSet(tasks), renderer) as rollouts:
        result = rollouts(["0", "1"], trainer)
    assert trainer.limits == [44, 16]
    assert (rollouts.samples, result["episode_reward"]) == (2, [1.0, 1.0])
    for logprobs, mask in zip(result["logprobs"], result["env_mask"], strict=True):
        assert [int(value != 0) for value in logprobs] == mask
        assert sum(math.isnan(value) for value in logprobs) == 2  # one for each turn


# --- tasks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gsm8k", "calculator", "gym", "textarena", "function_calls", "dev"])
def test_learning_task_has_enough_distinct_held_out_tasks(bench: ModuleType, name: str) -> None:
    config = bench.TASKS[name].make_config()
    train, held_out = load_tasks(config.rollout.tasks), load_tasks(config.eval.tasks)
    train_data, held_out_data = (
        {json.dumps(task.data) for task in tasks.tasks} for tasks in (train, held_out)
    )
    assert len(held_out_data) == len(held_out) >= 400
    assert not train_data & held_out_data


def test_learning_task_score_is_between_zero_and_one(bench: ModuleType) -> None:
    assert bench.TASKS["textarena"].compute_score([-1.0, -1.0, 0.0, 1.0]) == 0.375
    assert bench.TASKS["gsm8k"].compute_score([0.0, 1.0]) == 0.5


def test_function_calls_train_and_held_out_calls_are_disjoint(bench: ModuleType) -> None:
    from learning_parts.function_calls import make_tasks  # pyright: ignore[reportMissingImports]

    train, held_out = (
        {json.dumps([task["name"], task["arguments"]]) for task in make_tasks(240, held_out=flag)}
        for flag in (False, True)
    )
    assert len(train) == len(held_out) == 240
    assert not train & held_out


def test_function_calls_share_no_template_function_or_value_with_ablations(bench: ModuleType) -> None:
    from ablation_parts.tasks import TASKS  # pyright: ignore[reportMissingImports]
    from learning_parts.function_calls import (  # pyright: ignore[reportMissingImports]
        EXAMPLES,
        FUNCTIONS,
        PHRASINGS,
        make_tasks,
    )

    questions = [
        example.question
        for task in TASKS.values()
        for example in islice(task.make_examples(0, is_held_out=True), 400)
    ]
    demonstrations = [text for task in TASKS.values() for text, _ in task.demonstrations]
    templates = [template for phrasings in PHRASINGS.values() for template in phrasings]
    for template in [*templates, *(question for question, _, _ in EXAMPLES)]:
        pattern = re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(template)))
        assert not [text for text in [*questions, *demonstrations] if pattern.fullmatch(text)]
    words = set(re.findall(r"\w+", " ".join([*questions, *demonstrations])))
    arguments = [value for task in make_tasks(600, held_out=True) for value in task["arguments"].values()]
    assert not {value for value in arguments if isinstance(value, str)} & words
    assert not FUNCTIONS.keys() & set(re.findall(r"\w+", TASKS["tools"].instruction))


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([make_call("extend_loan", card=7, weeks=30)], 1.0),
        ([make_call("extend_loan", weeks=30, card=7)], 1.0),
        ([make_call("extend_loan", card=7, weeks=31)], 2 / 3),
        ([make_call("extend_loan", card="7", weeks=30)], 2 / 3),
        ([make_call("extend_loan", card=7, weeks=30, days=0)], 3 / 4),
        ([make_call("extend_loan")], 1 / 3),
        ([make_call("order_item", card=7, weeks=30)], 0.0),
        ([ToolCall(id="call", name="extend_loan", arguments='{"card": 7')], 0.0),
        ([make_call("extend_loan", card=7, weeks=30)] * 2, 0.0),
        ([], 0.0),
    ],
)
def test_function_call_score_counts_correct_name_and_arguments(
    bench: ModuleType, calls: list[ToolCall], expected: float
) -> None:
    from learning_parts.function_calls import score  # pyright: ignore[reportMissingImports]

    task = {"name": "extend_loan", "arguments": {"card": 7, "weeks": 30}}
    assert score(task, make_transcript(*calls)) == pytest.approx(expected)


def test_evaluator_uses_fp32_for_all_contenders(bench: ModuleType) -> None:
    from learning_parts.evaluation import Evaluator  # pyright: ignore[reportMissingImports]

    async def get_dtype() -> str:
        async with Evaluator(bench.TASKS["function_calls"]) as evaluator:
            return evaluator.model_config.dtype

    assert asyncio.run(get_dtype()) == "fp32"
