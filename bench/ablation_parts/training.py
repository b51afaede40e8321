"""The settings of an experiment, and GRPO training of a batch of experiments.

The end of a tensor's name lists its axes: K experiments, G groups of an experiment, N replies of a group,
R = G * N replies of an experiment, and T tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ablation_parts.model import (
    ADAPTER_RANK,
    Adapters,
    BatchedLoraModel,
    BatchedPolicy,
    Prompts,
    SampledReplies,
)
from ablation_parts.tasks import ChatEncoder, Example, Task

GROUP_SIZE = 8
MAX_NEW_TOKENS = 24
HELD_OUT_EXAMPLES = 200
HELD_OUT_SEED = 999
SAMPLING_SEED = 1
EVALUATION_INTERVAL = 10
"""The default number of steps between evaluations."""
PROGRESS_INTERVAL = 20
KL_INTERVAL = 5
"""The number of steps between KL measurements if no experiment has a target KL."""
ADAM_BETA1 = 0.9
ADAM_EPSILON = 1e-8
HARD_GROUP_MEAN = 0.25
MIN_RATIO, MAX_RATIO = 0.8, 1.28
"""In the second and later updates on a batch, tokens beyond these probability ratios get no gradient."""


@dataclass(frozen=True)
class ExperimentSettings:
    seed: int = 0
    """Selects the training examples."""
    learning_rate: float = 3e-4
    """Adam's learning rate after warm-up."""
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiplies the learning rate by the fraction of groups with signal, or by its square root."""
    target_kl: float = 0.0
    """Adapts the learning rate so that a step changes the policy by this KL per token. 0 turns this off."""
    max_kl: float = 0.0
    """Lowers the learning rate while a step changes the policy by more than this KL per token. 0 turns this
    off."""
    warmup_steps: int = 3
    """The number of steps in which the learning rate rises."""
    min_signal_groups: int = 0
    """Adds the gradients of several steps until this number of groups had signal, before an update."""
    is_on_policy: bool = False
    """Samples with the current adapter instead of the one of the previous step."""
    adapter_alpha: float = 32.0
    """The scale of the adapter, times its rank."""
    adam_beta2: float = 0.95
    """The decay of Adam's second moment."""
    max_gradient_norm: float = 1.0
    """The norm to which gradients are clipped. 0 turns clipping off."""
    groups: int = 3
    """The number of groups, of 8 replies each, per step."""
    epochs: int = 1
    """The number of updates on each batch."""
    hard_group_epochs: int = 0
    """The number of additional updates on groups in which at most a quarter of the replies are correct."""
    should_divide_by_std: bool = True
    """Divides advantages by the standard deviation of the group's rewards. If false, doubles them instead,
    which is the same for a group in which half of the replies are correct."""
    normalization: Literal["groups_used", "all_groups", "all_tokens"] = "groups_used"
    """Divides the loss by the number of replies in groups that have an advantage, of all replies, or of all
    tokens."""
    positive_weight: float = 1.0
    """Multiplies positive advantages."""
    failed_group_penalty: float = 0.0
    """The negative of the advantage of all replies in a group without any reward."""
    easy_group_discount: float = 0.0
    """Multiplies advantages by 1 - discount * mean reward of the group."""
    entropy_bonus: float = 0.0
    """Adds bonus * (mean logprob of the batch - the token's logprob) to a token's advantage."""

    def with_seed(self, seed: int) -> ExperimentSettings:
        return replace(self, seed=seed)

    def describe(self) -> str:
        """Return the values, other than the seed, that differ from the defaults."""
        changes = [
            f"{item.name}={getattr(self, item.name)}"
            for item in fields(self)
            if item.name != "seed" and getattr(self, item.name) != item.default
        ]
        return " ".join(changes) or "defaults"


@dataclass(frozen=True)
class Evaluation:
    """Greedy scores on the held-out examples."""

    step: int
    samples: int
    """The number of replies that the experiment has trained on."""
    score: float
    """The mean over the kinds of questions."""
    score_by_kind: list[float]


@dataclass
class Curves:
    """The history of one experiment. Every list but ``evaluations`` has one value per step."""

    settings: ExperimentSettings
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    reward: list[float] = field(default_factory=list[float])
    groups_with_signal: list[int] = field(default_factory=list[int])
    entropy: list[float] = field(default_factory=list[float])
    """The mean entropy per sampled token, in nats."""
    gradient_norm: list[float] = field(default_factory=list[float])
    """The norm of the first update's gradient before clipping."""
    duplicates: list[float] = field(default_factory=list[float])
    """The mean fraction of duplicate replies in a group (see `measure_duplicates`)."""
    kl: list[float] = field(default_factory=list[float])
    """The approximate KL per token between the policies before and after the step, 0 if not measured."""
    learning_rate_factor: list[float] = field(default_factory=list[float])
    """The factor by which ``target_kl`` has changed the learning rate."""


@dataclass(frozen=True)
class GroupAdvantages:
    values_KGN: Tensor
    is_active_KG: Tensor
    """True for the groups that an experiment uses. The tensors have as many as the largest experiment."""
    groups_with_signal_K: Tensor
    """The number of groups whose rewards differ."""
    groups_used_K: Tensor
    """The number of groups with signal, and of failed groups that have a penalty."""
    divisor_K: Tensor
    """The number by which the loss is divided, unless it is divided by the number of tokens."""
    is_hard_KG: Tensor
    """True for the groups in which some replies are correct, but at most a quarter."""


@dataclass(frozen=True)
class UpdateMetrics:
    reward_K: Tensor
    groups_with_signal_K: Tensor
    entropy_K: Tensor
    gradient_norm_K: Tensor
    kl_K: Tensor


def make_column(settings: Sequence[ExperimentSettings], name: str, device: str) -> Tensor:
    """Return one setting of all experiments as a tensor [K]."""
    return torch.tensor([float(getattr(setting, name)) for setting in settings], device=device)


def compute_advantages(rewards_KGN: Tensor, settings: Sequence[ExperimentSettings]) -> GroupAdvantages:
    def column(name: str) -> Tensor:
        return make_column(settings, name, str(rewards_KGN.device))[:, None, None]

    groups, size = rewards_KGN.shape[1:]
    is_active = torch.arange(groups, device=rewards_KGN.device)[None, :, None] < column("groups")
    mean = rewards_KGN.mean(-1, keepdim=True)
    std = rewards_KGN.std(-1, unbiased=False, keepdim=True)
    values = rewards_KGN - mean
    values = torch.where(column("should_divide_by_std") == 1, values / (std + 1e-6), values * 2)
    values = torch.where(values > 0, values * column("positive_weight"), values)
    values = values * (1 - column("easy_group_discount") * mean)
    has_failed, penalty = mean == 0, column("failed_group_penalty")
    values = torch.where(has_failed, -penalty.expand_as(values), values) * is_active
    has_signal = (std > 0) & is_active
    is_used = ((std > 0) | (has_failed & (penalty > 0))) & is_active
    groups_used_K = is_used.float().sum((1, 2))
    by_all = torch.tensor([setting.normalization == "all_groups" for setting in settings])
    divisor_K = torch.where(
        by_all.to(rewards_KGN.device), column("groups")[:, 0, 0], groups_used_K.clamp_min(1)
    )
    is_hard_KG = ((mean > 0) & (mean <= HARD_GROUP_MEAN) & is_active)[..., 0]
    signal_K = has_signal.float().sum((1, 2))
    return GroupAdvantages(values, is_active[..., 0], signal_K, groups_used_K, divisor_K * size, is_hard_KG)


class BatchedAdam:
    """Adam with gradient clipping, whose settings and step count differ between experiments."""

    def __init__(self, adapters: Adapters, settings: Sequence[ExperimentSettings], device: str) -> None:
        self.adapters = adapters
        self.max_norm_K = make_column(settings, "max_gradient_norm", device)
        self.beta1_K11 = torch.full((len(settings), 1, 1), ADAM_BETA1, device=device)
        self.beta2_K11 = make_column(settings, "adam_beta2", device)[:, None, None]
        self.beta1_power_K11 = torch.ones_like(self.beta1_K11)
        self.beta2_power_K11 = torch.ones_like(self.beta2_K11)
        self.moments = {
            name: (torch.zeros_like(weight), torch.zeros_like(weight)) for name, weight in adapters.items()
        }

    @torch.no_grad()
    def step(self, gradients: Adapters, learning_rate_K: Tensor, should_update_K: Tensor) -> Tensor:
        """Update the adapters of the selected experiments, and return the norm of every gradient [K]."""
        squares = [gradient.pow(2).flatten(1).sum(1) for gradient in gradients.values()]
        norm_K = torch.sqrt(sum(squares, torch.zeros_like(squares[0])))
        factor_K = torch.where(self.max_norm_K > 0, (self.max_norm_K / (norm_K + 1e-9)).clamp_max(1), 1)
        selected = should_update_K[:, None, None]
        beta1, beta2 = self.beta1_K11, self.beta2_K11
        self.beta1_power_K11 = torch.where(selected, self.beta1_power_K11 * beta1, self.beta1_power_K11)
        self.beta2_power_K11 = torch.where(selected, self.beta2_power_K11 * beta2, self.beta2_power_K11)
        # An experiment that has not been updated yet has a power of 1 here; the result is not used.
        correction1 = (1 - self.beta1_power_K11).clamp_min(1e-9)
        correction2 = (1 - self.beta2_power_K11).clamp_min(1e-9)
        for name, weight in self.adapters.items():
            gradient = gradients[name] * factor_K[:, None, None]
            first, second = self.moments[name]
            first.copy_(torch.where(selected, first * beta1 + (1 - beta1) * gradient, first))
            second.copy_(torch.where(selected, second * beta2 + (1 - beta2) * gradient * gradient, second))
            change = (first / correction1) / ((second / correction2).sqrt() + ADAM_EPSILON)
            weight -= torch.where(selected, learning_rate_K[:, None, None] * change, 0)
        return norm_K


class ExperimentBatch:
    """Experiments on one task that train at the same time, each with its own adapter."""

    def __init__(
        self,
        folder: Path,
        task: Task,
        settings: Sequence[ExperimentSettings],
        device: str,
        held_out_examples: int = HELD_OUT_EXAMPLES,
    ) -> None:
        self.task, self.settings, self.device = task, settings, device
        self.encoder = ChatEncoder(folder)
        self.model = BatchedLoraModel(folder, len(settings), device)
        prefix_ids = self.encoder.encode_prefix(task)
        self.policy = BatchedPolicy(self.model, prefix_ids, self.encoder.end_id, MAX_NEW_TOKENS)
        self.optimizer = BatchedAdam(self.model.adapters, settings, device)
        self.generator = torch.Generator(device).manual_seed(SAMPLING_SEED)
        self.groups = max(setting.groups for setting in settings)
        self.streams = [task.make_examples(setting.seed, is_held_out=False) for setting in settings]
        self.held_out = list(islice(task.make_examples(HELD_OUT_SEED, is_held_out=True), held_out_examples))
        self.learning_rate_factor_K = torch.ones(len(settings), device=device)
        self.previous_adapters: Adapters | None = None
        self.accumulated: Adapters = {}
        self.signal_since_update_K = torch.zeros(len(settings), device=device)
        by_tokens = [setting.normalization == "all_tokens" for setting in settings]
        self.divides_by_tokens_K = torch.tensor(by_tokens, device=device)
        self.model.adapter_scale_K11 = self._column("adapter_alpha")[:, None, None] / ADAPTER_RANK
        self.curves = [Curves(setting) for setting in settings]

    def evaluate(self, step: int) -> None:
        prompts = [self.encoder.encode_question(example.question) for example in self.held_out]
        with torch.no_grad():
            adapters = self.model.cast_adapters()
        replies = self.policy.sample(adapters, [prompts] * len(self.settings), self.generator, is_greedy=True)
        for curves, row in zip(self.curves, self._list_replies(replies), strict=True):
            scores: list[list[float]] = [[] for _ in self.task.kinds]
            for example, ids in zip(self.held_out, row, strict=True):
                scores[example.kind].append(self.task.score(self.encoder.decode(ids), example.answer))
            means = [sum(values) / len(values) for values in scores]
            score, samples = sum(means) / len(means), step * curves.settings.groups * GROUP_SIZE
            curves.evaluations.append(Evaluation(step, samples, score, [round(mean, 2) for mean in means]))

    def train_step(self, step: int) -> None:
        """Sample replies with the adapters of the previous step, score them, and update the adapters."""
        with torch.no_grad():
            adapters = self.model.cast_adapters()
        sampling_adapters = self._select_sampling_adapters(adapters)
        self.previous_adapters = adapters
        # Experiments with fewer groups sample as many as the largest one, and ignore the extra groups.
        examples = [[next(stream) for _ in range(self.groups)] for stream in self.streams]
        prompts = [
            [self.encoder.encode_question(example.question) for example in row for _ in range(GROUP_SIZE)]
            for row in examples
        ]
        replies = self.policy.sample(sampling_adapters, prompts, self.generator, is_greedy=False)
        reply_ids = self._list_replies(replies)
        metrics = self.update(step, prompts, replies, self._score(examples, reply_ids))
        self._record(metrics, reply_ids)

    def _select_sampling_adapters(self, current: Adapters) -> Adapters:
        """Return the adapters of the previous step, or the current ones for the experiments on policy."""
        if self.previous_adapters is None:
            return current
        is_current = (self._column("is_on_policy") == 1)[:, None, None]
        previous = self.previous_adapters
        return {name: torch.where(is_current, weight, previous[name]) for name, weight in current.items()}

    def update(
        self, step: int, prompts: Prompts, replies: SampledReplies, rewards_KGN: Tensor
    ) -> UpdateMetrics:
        """Train on replies with these rewards. Experiments without any advantage do not change."""
        advantages = compute_advantages(rewards_KGN, self.settings)
        is_active_KR1 = advantages.is_active_KG.repeat_interleave(rewards_KGN.shape[2], 1)[..., None]
        trained_KRT = replies.mask_KRT & is_active_KR1
        bonus_K = self._column("entropy_bonus")
        excess_KRT = replies.logprobs_KRT - _average(replies.logprobs_KRT, trained_KRT)[:, None, None]
        bonuses_KRT = bonus_K[:, None, None] * excess_KRT * is_active_KR1
        advantages_KRT = advantages.values_KGN.flatten(1)[..., None] - bonuses_KRT
        learning_rate_K = self._compute_learning_rates(step, advantages.groups_with_signal_K)
        has_gradient_K = (advantages.groups_used_K > 0) | (bonus_K > 0)
        divisor_K = torch.where(self.divides_by_tokens_K, trained_KRT.sum((1, 2)), advantages.divisor_K)
        is_hard_KR1 = advantages.is_hard_KG.repeat_interleave(rewards_KGN.shape[2], 1)[..., None]
        logprobs_by_epoch: list[Tensor] = []
        norms_by_epoch: list[Tensor] = []
        for epoch in range(max(setting.epochs + setting.hard_group_epochs for setting in self.settings)):
            is_full_K = self._column("epochs") > epoch
            is_hard_only_K = ~is_full_K & (self._column("epochs") + self._column("hard_group_epochs") > epoch)
            should_update_K = has_gradient_K & (is_full_K | (is_hard_only_K & advantages.is_hard_KG.any(1)))
            is_used_KR1 = is_full_K[:, None, None] | (is_hard_only_K[:, None, None] & is_hard_KR1)
            logprobs_KRT = self.policy.compute_logprobs(self.model.cast_adapters(), prompts, replies)
            ratio_KRT = (logprobs_KRT - replies.logprobs_KRT).exp()
            terms_KRT = advantages_KRT * ratio_KRT * replies.mask_KRT * is_used_KR1
            terms_KRT = terms_KRT * should_update_K[:, None, None]
            if epoch > 0:
                terms_KRT = torch.where(_is_clipped(advantages_KRT, ratio_KRT), 0, terms_KRT)
            loss = -(terms_KRT / divisor_K[:, None, None]).sum()
            gradients = torch.autograd.grad(loss, list(self.model.adapters.values()))
            named_gradients = dict(zip(self.model.adapters, gradients, strict=True))
            logprobs_by_epoch.append(logprobs_KRT.detach())
            if epoch == 0:
                should_update_K = self._accumulate(
                    named_gradients, advantages.groups_with_signal_K, should_update_K
                )
            norms_by_epoch.append(self.optimizer.step(named_gradients, learning_rate_K, should_update_K))
        kl_K = torch.zeros_like(bonus_K)
        if step % KL_INTERVAL == 0 or any(
            setting.target_kl + setting.max_kl > 0 for setting in self.settings
        ):
            with torch.no_grad():
                logprobs_KRT = self.policy.compute_logprobs(self.model.cast_adapters(), prompts, replies)
            kl_K = _average(0.5 * (logprobs_KRT - logprobs_by_epoch[0]).pow(2), trained_KRT)
            self._adapt_learning_rate(kl_K, has_gradient_K)
        reward_sum_K = (rewards_KGN * advantages.is_active_KG[..., None]).sum((1, 2))
        return UpdateMetrics(
            reward_K=reward_sum_K / (self._column("groups") * rewards_KGN.shape[2]),
            groups_with_signal_K=advantages.groups_with_signal_K,
            entropy_K=_average(replies.entropies_KRT, trained_KRT),
            gradient_norm_K=norms_by_epoch[0],
            kl_K=kl_K,
        )

    def _accumulate(
        self, gradients: Adapters, groups_with_signal_K: Tensor, should_update_K: Tensor
    ) -> Tensor:
        """Add the gradients since the last update to ``gradients``, for the experiments that wait for groups
        with signal. Return the experiments to update now."""
        if not any(setting.min_signal_groups for setting in self.settings):
            return should_update_K
        min_K = self._column("min_signal_groups")
        self.signal_since_update_K += groups_with_signal_K
        is_due_K = should_update_K & (self.signal_since_update_K >= min_K)
        for name, gradient in gradients.items():
            total = self.accumulated.get(name, torch.zeros_like(gradient)) + gradient
            gradients[name] = total
            self.accumulated[name] = torch.where((is_due_K | (min_K == 0))[:, None, None], 0, total)
        self.signal_since_update_K = torch.where(is_due_K, 0, self.signal_since_update_K)
        return is_due_K

    def _column(self, name: str) -> Tensor:
        return make_column(self.settings, name, self.device)

    def _compute_learning_rates(self, step: int, groups_with_signal_K: Tensor) -> Tensor:
        scales: list[float] = []
        for setting, signal in zip(self.settings, groups_with_signal_K.tolist(), strict=True):
            fraction = signal / setting.groups
            warmup = min(1, step / (setting.warmup_steps + 1))
            scaling = {"none": 1.0, "linear": fraction, "sqrt": math.sqrt(fraction)}
            scales.append(warmup * scaling[setting.learning_rate_scaling])
        rate_K = self._column("learning_rate") * self.learning_rate_factor_K
        return rate_K * torch.tensor(scales, device=self.device)

    def _adapt_learning_rate(self, kl_K: Tensor, was_updated_K: Tensor) -> None:
        """Move the learning rate of the experiments with a target or maximum KL toward the rate that reaches
        it."""
        target_K, max_K, factor_K = (
            self._column("target_kl"),
            self._column("max_kl"),
            self.learning_rate_factor_K,
        )
        change_K = (torch.maximum(target_K, max_K) / kl_K.clamp_min(1e-8)).sqrt().clamp(0.7, 1.4)
        upper_K = torch.where(max_K > 0, 1.0, 3.0)
        adapted_K = torch.minimum((factor_K * change_K).clamp_min(0.02), upper_K)
        is_adapted_K = ((target_K > 0) | (max_K > 0)) & was_updated_K
        self.learning_rate_factor_K = torch.where(is_adapted_K, adapted_K, factor_K)

    def _list_replies(self, replies: SampledReplies) -> list[list[list[int]]]:
        """Return the sampled tokens by experiment and reply, without padding."""
        rows = zip(replies.ids_KRT.tolist(), replies.lengths_KR.tolist(), strict=True)
        return [[ids[:length] for ids, length in zip(*row, strict=True)] for row in rows]

    def _score(self, examples: list[list[Example]], replies: list[list[list[int]]]) -> Tensor:
        """Return the rewards [K, G, N], which are 0 in groups that an experiment does not have."""
        rewards_KGN = torch.zeros(len(self.settings), self.groups, GROUP_SIZE)
        for k, setting in enumerate(self.settings):
            for i, ids in enumerate(replies[k][: setting.groups * GROUP_SIZE]):
                group, member = divmod(i, GROUP_SIZE)
                answer = examples[k][group].answer
                rewards_KGN[k, group, member] = self.task.score(self.encoder.decode(ids), answer)
        return rewards_KGN.to(self.device)

    def _record(self, metrics: UpdateMetrics, replies: list[list[list[int]]]) -> None:
        for k, curves in enumerate(self.curves):
            curves.reward.append(round(float(metrics.reward_K[k]), 3))
            curves.groups_with_signal.append(int(metrics.groups_with_signal_K[k]))
            curves.entropy.append(round(float(metrics.entropy_K[k]), 3))
            curves.gradient_norm.append(round(float(metrics.gradient_norm_K[k]), 2))
            duplicates = measure_duplicates(replies[k][: curves.settings.groups * GROUP_SIZE])
            curves.duplicates.append(round(duplicates, 2))
            curves.kl.append(round(float(metrics.kl_K[k]), 5))
            curves.learning_rate_factor.append(round(float(self.learning_rate_factor_K[k]), 3))


def measure_duplicates(replies: list[list[int]]) -> float:
    """Return the mean fraction of duplicates in a group: 0 if all replies differ, 1 if all are the same."""
    fractions: list[float] = []
    for start in range(0, len(replies), GROUP_SIZE):
        distinct = len({tuple(ids) for ids in replies[start : start + GROUP_SIZE]})
        fractions.append(1 - (distinct - 1) / (GROUP_SIZE - 1))
    return sum(fractions) / len(fractions)


def _average(values_KRT: Tensor, mask_KRT: Tensor) -> Tensor:
    """Return the mean [K] over the tokens in the mask."""
    return (values_KRT * mask_KRT).sum((1, 2)) / mask_KRT.sum((1, 2))


def _is_clipped(advantages_KRT: Tensor, ratio_KRT: Tensor) -> Tensor:
    """Return True for the tokens that have already moved far enough in the direction of their advantage."""
    return ((advantages_KRT > 0) & (ratio_KRT > MAX_RATIO)) | ((advantages_KRT < 0) & (ratio_KRT < MIN_RATIO))


def run_experiments(
    batch: ExperimentBatch,
    steps: int,
    seconds: float,
    report: Callable[[str], None],
    evaluation_interval: int = EVALUATION_INTERVAL,
) -> list[Curves]:
    """Train for ``steps`` steps or until ``seconds`` have passed, and return every experiment's history."""
    started_at = time.monotonic()
    batch.evaluate(0)
    report(f"{batch.task.name}: the untrained model scores {batch.curves[0].evaluations[0].score:.2f}")
    for step in range(1, steps + 1):
        batch.train_step(step)
        elapsed = time.monotonic() - started_at
        is_last = step == steps or elapsed > seconds
        if is_last or step % evaluation_interval == 0:
            batch.evaluate(step)
        if is_last or step % PROGRESS_INTERVAL == 0:
            scores = " ".join(f"{curves.evaluations[-1].score:.2f}" for curves in batch.curves)
            report(f"{batch.task.name}: step {step} after {elapsed:.0f} s: {scores}")
        if is_last:
            break
    return batch.curves
