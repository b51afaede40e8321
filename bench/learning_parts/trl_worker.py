"""Train with TRL's GRPOTrainer, in an environment that contains TRL.

    python -m learning_parts.trl_worker arguments.json

The prompts of the dataset are the indices of the tasks. A rollout function runs the same agents as Instar: it
runs all episodes of a step concurrently, and generates with TRL's own method as soon as all of them wait for
a reply. With vLLM, this method copies the weights to vLLM after every step, and the trainer gets the logprobs
of the sampled tokens, to correct for differences between vLLM and the trained model. After every step, the
adapter is saved and a line is added to `progress.jsonl`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from instar.config import RunConfig
from instar.models import device_and_dtype, load_tokenizer, resolve_model
from instar.record.base import Renderer
from instar.rollout.tasks import TaskSet, load_tasks
from learning_parts.episodes import Episode, EpisodeRunner, ReplyBatcher, SampledTokens
from learning_parts.results import Checkpoint
from learning_parts.tasks import GROUP_SIZE, LORA, TASKS
from learning_parts.trl_run import PROGRESS_FILE, TrlSettings

MAX_STEPS = 10**6


class AgentRollouts:
    """The rollout function of the trainer. It counts the samples and the sampled tokens."""

    def __init__(self, config: RunConfig, taskset: TaskSet, renderer: Renderer) -> None:
        self._taskset = taskset
        self._batcher = ReplyBatcher(self._generate_batch)
        self._episodes = EpisodeRunner(config, taskset, renderer, self._batcher.generate)
        # One event loop for all steps, because scorers may keep processes that belong to their loop.
        self._event_loop = asyncio.Runner()
        self._event_loop.run(self._episodes.start())
        self._trainer: Any = None
        self.samples = 0
        self.tokens = 0

    def __enter__(self) -> AgentRollouts:
        return self

    def __exit__(self, *_: object) -> None:
        self._event_loop.run(self._episodes.close())
        self._event_loop.close()

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        self._trainer = trainer
        episodes = self._event_loop.run(self._run_episodes(prompts))
        self.samples += len(episodes)
        self.tokens += sum(sum(episode.mask) for episode in episodes)
        return {
            "prompt_ids": [episode.prompt_ids for episode in episodes],
            "completion_ids": [episode.completion_ids for episode in episodes],
            "logprobs": [episode.logprobs for episode in episodes] if trainer.use_vllm else None,
            "env_mask": [episode.mask for episode in episodes],
            "episode_reward": [episode.reward for episode in episodes],
        }

    async def _run_episodes(self, prompts: list[str]) -> list[Episode]:
        return await self._batcher.run_all(
            [self._episodes.run(self._taskset[int(prompt)]) for prompt in prompts]
        )

    def _generate_batch(self, prompts: list[list[int]], limits: list[int]) -> list[SampledTokens]:
        trainer = self._trainer
        if trainer.use_vllm:
            trainer.vllm_generation.max_completion_length = max(limits)
        else:
            trainer.generation_config.max_new_tokens = max(limits)
        replies, logprobs = trainer._generate_single_turn(prompts, None, {}, 1)
        if logprobs is None:
            return [SampledTokens(reply) for reply in replies]
        return [SampledTokens(list(reply), values) for reply, values in zip(replies, logprobs, strict=True)]


def get_rewards(episode_reward: list[float | None], **_: Any) -> list[float | None]:
    """The reward function of the trainer, which returns the rewards from the rollout function."""
    return episode_reward


class CheckpointWriter(TrainerCallback):
    """Saves the adapter after every step, and stops the training after ``limit_seconds``. The time that is
    spent on saving does not count."""

    def __init__(self, rollouts: AgentRollouts, limit_seconds: float) -> None:
        self._rollouts = rollouts
        self._limit_seconds = limit_seconds
        self._started_at = 0.0
        self._saving_seconds = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started_at = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        now = time.monotonic()
        seconds = now - self._started_at - self._saving_seconds
        adapter = f"adapters/step-{state.global_step:06d}"
        model.save_pretrained(adapter)
        checkpoint = Checkpoint(
            state.global_step, seconds, self._rollouts.samples, self._rollouts.tokens, adapter
        )
        with Path(PROGRESS_FILE).open("a") as file:
            file.write(json.dumps(asdict(checkpoint)) + "\n")
        control.should_training_stop = seconds >= self._limit_seconds
        self._saving_seconds += time.monotonic() - now


def make_grpo_config(
    settings: TrlSettings, seed: int, device: str, max_context: int, stop_token_ids: list[int]
) -> GRPOConfig:
    options: dict[str, Any] = {
        "output_dir": "trainer",
        "learning_rate": settings.lr,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": settings.micro_batch,
        "gradient_accumulation_steps": settings.groups * GROUP_SIZE // settings.micro_batch,
        "num_generations": GROUP_SIZE,
        "max_steps": MAX_STEPS,
        "gradient_checkpointing": False,
        "bf16": settings.dtype != "fp32",
        "use_cpu": device == "cpu",
        "seed": seed,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
    }
    if settings.vllm_gpu_memory is not None:
        options |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": settings.vllm_gpu_memory,
            "vllm_max_model_length": max_context,
            # vLLM only reads the end tokens in the model's folder, not those of the loaded model.
            "generation_kwargs": {"stop_token_ids": stop_token_ids},
        }
    return GRPOConfig(**{**options, **settings.options})


def train(task_name: str, seed: int, seconds: float, settings: TrlSettings) -> None:
    set_seed(seed)
    config = TASKS[task_name].make_config()
    assert config.rollout is not None
    device, _ = device_and_dtype(config.model)
    folder = resolve_model(config.model.name)
    taskset = load_tasks(config.rollout.tasks)
    renderer = Renderer.load(folder, config.model)
    rollouts = AgentRollouts(config, taskset, renderer)
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)  # TRL gives vLLM the same name
    stop_token_ids = list(renderer.stop_token_ids)
    model.generation_config.eos_token_id = stop_token_ids
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=get_rewards,
        args=make_grpo_config(settings, seed, device, config.model.context_length, stop_token_ids),
        train_dataset=Dataset.from_list([{"prompt": str(index)} for index in range(len(taskset))]),
        processing_class=load_tokenizer(folder),
        peft_config=LoraConfig(
            r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        rollout_func=rollouts,
        callbacks=[CheckpointWriter(rollouts, seconds)],
    )
    with rollouts:
        trainer.train()


def main() -> None:
    arguments = json.loads(Path(sys.argv[1]).read_text())
    settings = TrlSettings(**arguments["settings"])
    train(arguments["task"], arguments["seed"], arguments["seconds"], settings)


if __name__ == "__main__":
    main()
