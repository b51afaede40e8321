"""Tests for bench/ablations.py: logprobs of batched adapters, updates, tasks and results."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Generator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.tiny import make_tiny_model

BENCH = Path(__file__).parents[3] / "bench"
PREFIX_IDS = [1, 40, 41, 42, 43]
END_ID = 2
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14, 15, 16, 17]]
"""Prompts of different lengths, so that some are padded."""
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def bench() -> Generator[ModuleType]:
    """The module bench/ablations.py, imported with its folder on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("ablations")
        for name in [name for name in sys.modules if name.split(".")[0] in ("ablations", "ablation_parts")]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def training(bench: ModuleType) -> ModuleType:
    return importlib.import_module("ablation_parts.training")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


def randomize_adapters(model: Any) -> None:
    """Give every experiment a different adapter that changes the model."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.adapters.items():
            if name.endswith(".B"):
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))


def compute_reference_logprobs(
    folder: Path, model: Any, k: int, ids: list[int], reply_length: int
) -> torch.Tensor:
    """Return transformers' logprobs for the last ``reply_length`` ids, with adapter ``k`` merged."""
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = dict(reference.named_parameters())
    with torch.no_grad():
        for name in {name.rpartition(".")[0] for name in model.adapters}:
            change = 2.0 * model.adapters[f"{name}.B"][k] @ model.adapters[f"{name}.A"][k]
            weights[f"model.layers.{name}.weight"].add_(change)
        logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logprobs[-reply_length - 1 : -1].gather(-1, torch.tensor(ids[-reply_length:])[:, None])[:, 0]


@pytest.mark.parametrize("experiments", [1, 2])
def test_policy_sampled_logprobs_equal_training_and_transformers(
    training: ModuleType, folder: Path, experiments: int
) -> None:
    model = training.BatchedLoraModel(folder, experiments, "cpu")
    randomize_adapters(model)
    policy = training.BatchedPolicy(model, PREFIX_IDS, END_ID, NEW_TOKENS)
    prompts = [PROMPTS] * experiments
    adapters = model.cast_adapters()
    replies = policy.sample(adapters, prompts, torch.Generator().manual_seed(3), is_greedy=False)
    training_logprobs = policy.compute_logprobs(adapters, prompts, replies)
    assert training_logprobs.requires_grad
    torch.testing.assert_close(training_logprobs.detach(), replies.logprobs_KRT, atol=1e-4, rtol=0)
    for k in range(experiments):
        for row, prompt in enumerate(PROMPTS):
            length = int(replies.lengths_KR[k, row])
            reply = replies.ids_KRT[k, row, :length].tolist()
            expected = compute_reference_logprobs(folder, model, k, PREFIX_IDS + prompt + reply, length)
            torch.testing.assert_close(replies.logprobs_KRT[k, row, :length], expected, atol=1e-4, rtol=0)


def test_policy_greedy_sampling_stops_at_the_end_token(training: ModuleType, folder: Path) -> None:
    model = training.BatchedLoraModel(folder, 1, "cpu")
    generator = torch.Generator().manual_seed(0)
    policy = training.BatchedPolicy(model, PREFIX_IDS, END_ID, NEW_TOKENS)
    replies = policy.sample(model.cast_adapters(), [PROMPTS], generator, is_greedy=True)
    policy.end_id = int(replies.ids_KRT[0, 0, 0])
    stopped = policy.sample(model.cast_adapters(), [PROMPTS[:1]], generator, is_greedy=True)
    assert int(stopped.lengths_KR[0, 0]) == 1
    assert stopped.mask_KRT[0, 0].tolist() == [True] + [False] * (NEW_TOKENS - 1)
    assert not stopped.logprobs_KRT[0, 0, 1:].any()


class UpdatedBatch:
    """A batch of experiments that are updated on two fixed replies each."""

    def __init__(self, training: ModuleType, folder: Path, settings: list[Any]) -> None:
        task = importlib.import_module("ablation_parts.tasks").TASKS["cmd"]
        self.batch = training.ExperimentBatch(folder, task, settings, "cpu")
        self.policy = training.BatchedPolicy(self.batch.model, PREFIX_IDS, END_ID, NEW_TOKENS)
        self.batch.policy = self.policy
        self.prompts = [[PROMPTS[0]] * 2] * len(settings)
        self.replies = self.policy.sample(
            self.batch.model.cast_adapters(), self.prompts, self.batch.generator, is_greedy=False
        )

    def update(self, step: int, rewards: list[list[float]]) -> list[float]:
        """Update with one group per experiment. Return each experiment's number of groups with signal."""
        metrics = self.batch.update(step, self.prompts, self.replies, torch.tensor(rewards)[:, None])
        return metrics.groups_with_signal_K.tolist()

    def compute_changes(self) -> torch.Tensor:
        """Return the change in the logprob of every reply since it was sampled."""
        with torch.no_grad():
            adapters = self.batch.model.cast_adapters()
            logprobs = self.policy.compute_logprobs(adapters, self.prompts, self.replies)
        return (logprobs - self.replies.logprobs_KRT).sum(-1)

    def copy_adapters(self, k: int) -> list[torch.Tensor]:
        return [weight[k].detach().clone() for weight in self.batch.model.adapters.values()]


@pytest.mark.parametrize("rewards", [[1.0, 0.0], [0.0, 1.0]])
def test_update_raises_the_rewarded_logprob_and_lowers_the_other(
    training: ModuleType, folder: Path, rewards: list[float]
) -> None:
    settings = [training.ExperimentSettings(groups=1, learning_rate=1e-2, epochs=epochs) for epochs in (1, 2)]
    updated = UpdatedBatch(training, folder, settings)
    assert updated.update(1, [rewards, rewards]) == [1, 1]
    changes_KR = updated.compute_changes()
    rewarded = rewards.index(1.0)
    assert (changes_KR[:, rewarded] > 1e-3).all()
    assert (changes_KR[:, 1 - rewarded] < -1e-3).all()


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_update_groups_without_signal_leave_weights_unchanged(
    training: ModuleType, folder: Path, reward: float
) -> None:
    updated = UpdatedBatch(training, folder, [training.ExperimentSettings(groups=1)] * 2)
    # After a first update, Adam's moments alone would move the weights.
    assert updated.update(1, [[1.0, 0.0], [1.0, 0.0]]) == [1, 1]
    before = [updated.copy_adapters(k) for k in range(2)]
    assert updated.update(2, [[1.0, 0.0], [reward, reward]]) == [1, 0]
    after = [updated.copy_adapters(k) for k in range(2)]
    assert not any(map(torch.equal, before[0], after[0]))
    assert all(map(torch.equal, before[1], after[1]))


def test_update_failed_group_with_penalty_lowers_all_replies(training: ModuleType, folder: Path) -> None:
    setting = training.ExperimentSettings(groups=1, learning_rate=1e-2, failed_group_penalty=0.3)
    updated = UpdatedBatch(training, folder, [setting])
    assert updated.update(1, [[0.0, 0.0]]) == [0]
    assert (updated.compute_changes() < -1e-3).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("calc", "f64ee590815bd66a"), ("cmd", "fdd84cc1ad1cc113"), ("tools", "11630f6e48adb7fb")],
)
def test_task_examples_are_those_of_the_published_results(
    bench: ModuleType, name: str, expected: str
) -> None:
    task = bench.TASKS[name]
    rows = [
        [example.kind, example.question, example.answer]
        for seed, is_held_out in ((0, False), (1, False), (2, False), (3, False), (999, True))
        for example in islice(task.make_examples(seed, is_held_out=is_held_out), 200)
    ]
    texts = json.dumps([task.instruction, task.demonstrations, rows])
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == expected


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("12 * 3", 1.0),
        (" (10 + 2) * 3 = 36\nmore", 1.0),
        ("36", 0.0),
        ("12 * 4", 0.0),
        ("6 ** 2", 0.0),
        ("36 / 0", 0.0),
        ("3 (12)", 0.0),
        ("12 * x", 0.0),
        ("+".join(["1"] * 36), 0.0),
    ],
)
def test_calculation_score_requires_an_expression_with_the_result(
    bench: ModuleType, text: str, score: float
) -> None:
    assert bench.TASKS["calc"].score(text, "36") == score


def test_main_writes_curves_and_prints_one_result_per_setting(
    bench: ModuleType,
    training: ModuleType,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = [training.ExperimentSettings(groups=1, epochs=2, seed=seed) for seed in (0, 1)]
    monkeypatch.setitem(bench.EXPERIMENT_SETS, "small", settings)
    options = ["--set=small", "--task=cmd", "--steps=2", f"--model={folder}", f"--out={tmp_path}", "--json"]
    bench.main(options)
    (result,) = json.loads(capsys.readouterr().out)["tasks"]["cmd"]
    assert result["setting"] == "groups=1 epochs=2"
    assert result["seeds"] == [0, 1]
    assert result["score_500"] == [0.0, 0.0]
    assert min(result["entropy"]) > 0
    curves = json.loads((tmp_path / "cmd.json").read_text())
    assert [evaluation["samples"] for evaluation in curves[1]["evaluations"]] == [0, 16]
    assert [len(curves[1][name]) for name in ("reward", "kl", "gradient_norm")] == [2, 2, 2]


def test_score_at_a_sample_count_is_from_the_last_evaluation(bench: ModuleType, training: ModuleType) -> None:
    curves = training.Curves(training.ExperimentSettings())
    for step, score in ((0, 0.1), (10, 0.2), (20, 0.3), (30, 0.25)):
        curves.evaluations.append(training.Evaluation(step, 24 * step, score, []))
    assert [bench.get_score_at(curves, samples) for samples in (0, 479, 480, 10_000)] == [0.1, 0.2, 0.3, 0.25]


def test_format_cell_shows_the_values_and_their_mean(bench: ModuleType) -> None:
    assert bench.format_cell([0.25, 0.75], 2) == "0.25 0.75 (0.50)"


@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_experiment_sets_have_two_seeds_per_setting(bench: ModuleType, name: str) -> None:
    experiments = bench.EXPERIMENT_SETS[name]
    assert [setting.describe() for setting in experiments[::2]] == [
        setting.describe() for setting in experiments[1::2]
    ]
    assert len(set(experiments)) == len(experiments)
    assert {setting.seed for setting in experiments} == ({2, 3} if name == "third" else {0, 1})
