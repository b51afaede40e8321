"""Compute the update for one batch with TRL and with Instar's local backend, and compare the two.

    python bench/compare_update.py [--task calc|cmd|tools] [--groups 3] [--seed 0] [--lr 3e-4]
        [--model FOLDER] [--json]

The interpreter needs `trl` as well as Instar. Both sides start from the same adapter with random weights and
get the same replies of the untrained model with the same rewards, in groups of 8 whose rewards differ.
``cosine`` and ``norm_ratio`` compare the gradients before clipping (Instar / TRL), over all weights and for
the layer in which they differ most. ``step_cosine`` compares the changes of the adapter by one step with the
optimizer settings of each side, but without clipping. ``entropy`` is the mean negative logprob of the sampled
tokens; ``good`` and ``bad`` are the changes of the mean logprob of rewarded and other replies by the step.
The rows are Instar's settings: normalization and dtype. TRL computes in fp32 with its default settings (loss
`dapo`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ablation_parts.model import ADAPTER_ALPHA, ADAPTER_RANK
from ablation_parts.tasks import TASKS, ChatEncoder
from ablation_parts.training import GROUP_SIZE, MAX_NEW_TOKENS
from ablations_trl import END
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from instar.backends.local.backend import LocalBackend
from instar.config import AdamConfig, LocalBackendConfig, LossConfig, ModelConfig
from instar.config import LoraConfig as InstarLoraConfig
from instar.data.advantages import Normalization, grpo, normalize
from instar.models import DEFAULT_MODEL, resolve_model
from instar.types import Sample

ADAPTER_STD = 0.01
INSTAR_SETTINGS: tuple[tuple[Normalization, str], ...] = (
    ("batch_sessions", "fp32"),
    ("batch_tokens", "fp32"),
    ("batch_sessions", "bf16"),
)
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reply:
    group: int
    prompt: list[int]
    ids: list[int]
    reward: float


@dataclass(frozen=True)
class Update:
    gradient: Weights
    change: Weights
    """The difference between the adapter after and before the step."""


def load_model(folder: Path) -> Any:
    """Return the model with an adapter whose weights are all random, so that none has the gradient 0."""
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        LoraConfig(r=ADAPTER_RANK, lora_alpha=ADAPTER_ALPHA, target_modules="all-linear"),
    )
    for _, parameter in list_adapter_weights(model):
        torch.nn.init.normal_(parameter, std=ADAPTER_STD)
    return model


def list_adapter_weights(model: Any) -> list[tuple[str, Any]]:
    """Return the adapter's weights with the names that Instar uses for them."""
    return [
        (name.removeprefix("base_model.model."), parameter)
        for name, parameter in model.named_parameters()
        if "lora_" in name
    ]


def copy_adapter(model: Any) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in list_adapter_weights(model)}


def sample_replies(model: Any, tokenizer: Any, folder: Path, options: argparse.Namespace) -> list[Reply]:
    """Sample groups until ``options.groups`` of them have different rewards."""
    task, encoder = TASKS[options.task], ChatEncoder(folder)
    prefix = encoder.encode_prefix(task)
    torch.manual_seed(options.seed)
    replies: list[Reply] = []
    for example in islice(task.make_examples(options.seed, is_held_out=False), 100):
        prompt = [*prefix, *encoder.encode_question(example.question)]
        with torch.no_grad():
            output = model.generate(
                input_ids=torch.tensor([prompt] * GROUP_SIZE),
                attention_mask=torch.ones(GROUP_SIZE, len(prompt), dtype=torch.long),
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=True,
                top_k=0,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        sampled = [cut_after(row, tokenizer.eos_token_id) for row in output[:, len(prompt) :].tolist()]
        rewards = [
            task.score(tokenizer.decode(ids, skip_special_tokens=True), example.answer) for ids in sampled
        ]
        if len(set(rewards)) > 1:
            group = len(replies) // GROUP_SIZE
            replies += [
                Reply(group, prompt, ids, reward) for ids, reward in zip(sampled, rewards, strict=True)
            ]
        if len(replies) == options.groups * GROUP_SIZE:
            return replies
    raise SystemExit("Too few of the groups have different rewards; choose a different --seed.")


def cut_after(ids: list[int], end_id: int) -> list[int]:
    return ids[: ids.index(end_id) + 1] if end_id in ids else ids


class GradientRecorder(TrainerCallback):
    def __init__(self) -> None:
        self.gradient: Weights = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.gradient = {name: weight.grad.clone() for name, weight in list_adapter_weights(model)}


def update_with_trl(model: Any, tokenizer: Any, replies: Sequence[Reply], lr: float, output: str) -> Update:
    def roll_out(prompts: list[Any], _: Any) -> dict[str, Any]:
        assert len(prompts) == len(replies)
        return {
            "prompt_ids": [reply.prompt for reply in replies],
            "completion_ids": [reply.ids for reply in replies],
            "logprobs": None,
            "reply_reward": [reply.reward for reply in replies],
        }

    def score(reply_reward: list[float], **_: Any) -> list[float | None]:
        return [*reply_reward]

    before = copy_adapter(model)
    recorder = GradientRecorder()
    config = GRPOConfig(
        output_dir=output,
        learning_rate=lr,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        per_device_train_batch_size=GROUP_SIZE,
        gradient_accumulation_steps=len(replies) // GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_NEW_TOKENS,
        max_steps=1,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    rows = [{"prompt": str(group)} for group in range(len(replies) // GROUP_SIZE)]
    GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        rollout_func=roll_out,
        callbacks=[recorder],
    ).train()
    after = copy_adapter(model)
    return Update(recorder.gradient, {name: after[name] - before[name] for name in before})


async def update_with_instar(
    initial: Weights,
    replies: Sequence[Reply],
    lr: float,
    model: ModelConfig,
    normalization: Normalization,
) -> Update:
    lora = InstarLoraConfig(rank=ADAPTER_RANK, alpha=ADAPTER_ALPHA)
    backend = LocalBackend(model, LocalBackendConfig(lora=lora))
    parameters = backend._parameters  # pyright: ignore[reportPrivateUsage]
    if parameters.keys() != initial.keys():
        raise SystemExit("TRL and Instar train different weights.")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(initial[name])
    samples = make_samples(replies)
    logprobs = await backend.forward(samples)
    for sample, values in zip(samples, logprobs, strict=True):
        sample.logprobs[:] = values
    await backend.forward_backward(normalize(samples, normalization), LossConfig(name="importance_sampling"))
    gradient = {
        name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None
    }
    await backend.optim_step(AdamConfig(lr=lr, grad_clip_norm=0.0))
    change = {name: parameter.detach().float() - initial[name] for name, parameter in parameters.items()}
    await backend.close()
    return Update(gradient, change)


def make_samples(replies: Sequence[Reply]) -> list[Sample]:
    samples: list[Sample] = []
    for start in range(0, len(replies), GROUP_SIZE):
        group = replies[start : start + GROUP_SIZE]
        for number, (reply, advantage) in enumerate(zip(group, grpo([r.reward for r in group]), strict=True)):
            mask = np.array([0.0] * len(reply.prompt) + [1.0] * len(reply.ids), np.float32)
            key = f"{reply.group}/{number}"
            samples.append(
                Sample(
                    key,
                    key,
                    token_ids=np.array([*reply.prompt, *reply.ids], np.int32),
                    mask=mask,
                    logprobs=np.full(len(mask), np.nan, np.float32),
                    advantages=mask * np.float32(advantage or 0.0),
                    versions=np.zeros(len(mask), np.int32),
                )
            )
    return samples


@torch.no_grad()
def measure_logprobs(model: Any, initial: Weights, change: Weights, replies: Sequence[Reply]) -> list[float]:
    """Return the mean logprob per token of each reply under the changed adapter."""
    for name, parameter in list_adapter_weights(model):
        parameter.copy_(initial[name] + change[name])
    means: list[float] = []
    for reply in replies:
        ids = torch.tensor([[*reply.prompt, *reply.ids]])
        logprobs = model(ids).logits[0, len(reply.prompt) - 1 : -1].log_softmax(-1)
        means.append(float(logprobs.gather(1, torch.tensor(reply.ids)[:, None]).mean()))
    return means


def flatten(weights: Weights, names: Sequence[str]) -> torch.Tensor:
    return torch.cat([weights[name].float().flatten() for name in names])


def compute_cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(first.double(), second.double(), dim=0))


def compare(ours: Update, theirs: Update) -> dict[str, float]:
    names = sorted(theirs.gradient)
    assert names == sorted(ours.gradient)
    ratios = [float(ours.gradient[n].float().norm() / theirs.gradient[n].norm()) for n in names]
    first, second = flatten(ours.gradient, names), flatten(theirs.gradient, names)
    ratio = float(first.norm() / second.norm())
    return {
        "cosine": compute_cosine(first, second),
        "worst_cosine": min(
            compute_cosine(flatten(ours.gradient, [n]), flatten(theirs.gradient, [n])) for n in names
        ),
        "norm_ratio": ratio,
        "worst_norm_ratio": max(ratios, key=lambda value: abs(np.log(value / ratio))),
        "step_cosine": compute_cosine(flatten(ours.change, names), flatten(theirs.change, names)),
        "step_norm_ratio": float(flatten(ours.change, names).norm() / flatten(theirs.change, names).norm()),
    }


def describe_effect(before: list[float], after: list[float], replies: Sequence[Reply]) -> dict[str, float]:
    changes = np.array(after) - np.array(before)
    lengths = np.array([len(reply.ids) for reply in replies])
    is_good = np.array([reply.reward > 0 for reply in replies])
    return {
        "entropy": float(-(np.array(after) * lengths).sum() / lengths.sum()),
        "good": float(changes[is_good].mean()),
        "bad": float(changes[~is_good].mean()),
    }


def run(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    folder = resolve_model(options.model)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=END, pad_token="<|endoftext|>"
    )
    model = load_model(folder)
    replies = sample_replies(model, tokenizer, folder, options)
    initial = copy_adapter(model)
    zero = {name: torch.zeros_like(weight) for name, weight in initial.items()}
    before = measure_logprobs(model, initial, zero, replies)
    with tempfile.TemporaryDirectory() as output:
        theirs = update_with_trl(model, tokenizer, replies, options.lr, output)
    results = {
        "before": describe_effect(before, before, replies),
        "TRL": describe_effect(before, measure_logprobs(model, initial, theirs.change, replies), replies),
    }
    for normalization, dtype in INSTAR_SETTINGS:
        config = ModelConfig(name=options.model, dtype=dtype, device="cpu", max_context=1024)  # pyright: ignore
        ours = asyncio.run(update_with_instar(initial, replies, options.lr, config, normalization))
        effect = describe_effect(before, measure_logprobs(model, initial, ours.change, replies), replies)
        results[f"Instar, {normalization}, {dtype}"] = {**compare(ours, theirs), **effect}
    return results


def show(results: dict[str, dict[str, float]]) -> None:
    names = list(results[list(results)[-1]])
    table = Table("", *names)
    for row, values in results.items():
        table.add_row(row, *(f"{values[name]:.4f}" if name in values else "" for name in names))
    Console(stderr=True, width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", choices=list(TASKS), default="calc")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON line")
    options = parser.parse_args()
    results = run(options)
    show(results)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
