"""Train on a task of the ablations with TRL's GRPOTrainer, to compare its curve with `ablations.py`.

    python bench/ablations_trl.py [--task calc] [--seed 0] [--steps 16] [--lr 3e-4] [--groups 3]
        [--model FOLDER] [--json]

The examples, the prompts, the scores and the held-out questions are those of `ablations.py` with the same
seed. TRL runs with its default settings except for the learning rate, without a schedule, and with LoRA of
rank 16 and alpha 32 on all linear layers. Without a GPU, a step takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from ablation_parts.model import ADAPTER_ALPHA, ADAPTER_RANK, choose_device
from ablation_parts.tasks import TASKS, Task
from ablation_parts.training import GROUP_SIZE, HELD_OUT_SEED, MAX_NEW_TOKENS
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from instar.models import DEFAULT_MODEL, resolve_model

END = "<|im_end|>"
HELD_OUT_EXAMPLES = 96


def make_prompt(task: Task, question: str) -> str:
    text = f"<|im_start|>system\n{task.instruction}{END}\n"
    for user, assistant in (*task.demonstrations, (question, None)):
        text += f"<|im_start|>user\n{user}{END}\n<|im_start|>assistant\n"
        text += "" if assistant is None else f"{assistant}{END}\n"
    return text


class GreedyEvaluation(TrainerCallback):
    """Computes the greedy score on the held-out questions, at the start and every ``interval`` steps."""

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerFast, interval: int) -> None:
        self._task, self._tokenizer, self._interval = task, tokenizer, interval
        self._examples = list(islice(task.make_examples(HELD_OUT_SEED, is_held_out=True), HELD_OUT_EXAMPLES))
        self.scores: dict[int, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._evaluate(model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % self._interval == 0:
            self._evaluate(model, state.global_step)

    @torch.no_grad()
    def _evaluate(self, model: Any, step: int) -> None:
        prompts = [make_prompt(self._task, example.question) for example in self._examples]
        inputs = self._tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        model.eval()
        outputs = model.generate(**inputs.to(model.device), max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        model.train()
        texts = self._tokenizer.batch_decode(
            outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        scores: list[list[float]] = [[] for _ in self._task.kinds]
        for example, text in zip(self._examples, texts, strict=True):
            scores[example.kind].append(self._task.score(text, example.answer))
        self.scores[step] = sum(sum(values) / len(values) for values in scores) / len(scores)
        print(f"step {step}: {self.scores[step]:.2f}", flush=True)


def train(options: argparse.Namespace, folder: Path, output: str) -> dict[int, float]:
    """Train, and return the greedy scores by step."""
    task = TASKS[options.task]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=END, pad_token="<|endoftext|>"
    )
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    examples = islice(task.make_examples(options.seed, is_held_out=False), options.groups * options.steps)
    rows = [{"prompt": make_prompt(task, example.question), "answer": example.answer} for example in examples]

    def score(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [
            task.score(text.split(END)[0], expected)
            for text, expected in zip(completions, answer, strict=True)
        ]

    has_gpu = choose_device() == "cuda"
    config = GRPOConfig(
        output_dir=output,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        per_device_train_batch_size=options.groups * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_NEW_TOKENS,
        max_steps=options.steps,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=has_gpu,
        use_cpu=not has_gpu,
        seed=options.seed,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    evaluation = GreedyEvaluation(task, tokenizer, options.every)
    lora = LoraConfig(
        r=ADAPTER_RANK, lora_alpha=ADAPTER_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[evaluation],
    )
    trainer.train()
    return evaluation.scores


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", choices=list(TASKS), default="calc")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--every", type=int, default=4, help="steps between evaluations")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--groups", type=int, default=3, help="number of groups per step")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--json", action="store_true", help="print the scores by step as one JSON line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as output:
        scores = train(options, resolve_model(options.model), output)
    if options.json:
        print(json.dumps({"task": options.task, "seed": options.seed, "lr": options.lr, "scores": scores}))


if __name__ == "__main__":
    main()
