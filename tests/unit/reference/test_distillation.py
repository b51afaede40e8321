"""Tests that a student learns from a teacher alone, through the store, batcher, backend and trainer.

The teacher is the student's model with all weights trained on one sentence, and there are no rewards. The
divergence of the student's samples from the teacher's distribution has to decrease.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import mean

import numpy as np

from instar.backends.local.backend import LocalBackend
from instar.config import (
    AdamConfig,
    EngineReferenceConfig,
    LocalBackendConfig,
    LocalEngineConfig,
    LossConfig,
    ModelConfig,
)
from instar.engines.base import Engine
from instar.engines.local.engine import LocalEngine
from instar.reference.factory import create_penalty
from instar.store.base import Store
from instar.store.sqlite import SqliteStore
from instar.sync.files import FileSync
from instar.trainer.loop import Trainer
from instar.trainer.monitor import Monitor, read_steps
from instar.trainer.publishing import PolicyPublisher
from instar.types import Channel, Group, GroupStatus, Sample, SamplingParams, SessionStatus, Task
from tests.tiny import make_tiny_model, make_tiny_tokenizer
from tests.unit.data.builders import RUN, make_call, make_session, put_test_run
from tests.unit.trainer.harness import make_config

STEPS = 10
SESSIONS = 256
MAX_TOKENS = 8
TOKENIZER = make_tiny_tokenizer()
PROMPT = TOKENIZER.encode("<|im_start|>user\ndigits<|im_end|>\n<|im_start|>assistant\n")
ENGINE = LocalEngineConfig(threads=1)


async def train_teacher(model: ModelConfig, folder: Path) -> None:
    ids = np.asarray([*PROMPT, *TOKENIZER.encode("615 893")], np.int32)
    mask = (np.arange(len(ids)) >= len(PROMPT)).astype(np.float32)
    sample = Sample("s", "s", ids, mask, mask * np.nan, mask, mask.astype(np.int32))
    backend = LocalBackend(model, LocalBackendConfig(lora=None, threads=1))
    for _ in range(8):
        await backend.forward_backward([sample], LossConfig(name="cross_entropy"))
        await backend.optim_step(AdamConfig(lr=3e-3))
    await backend.publish(folder)
    await backend.close()


async def sample_group(store: Store, engine: Engine, index: int) -> None:
    """Add a group of unscored sessions, sampled from the served policy."""
    group = Group(f"{RUN}/train/{index:06d}", RUN, Channel.TRAIN, index, SESSIONS, Task(f"t{index}", {}))
    await store.open_group(group)

    async def run_session(slot: int) -> None:
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=index * SESSIONS + slot)
        chunks = [chunk async for chunk in engine.generate(PROMPT, params)]
        session_id = f"{group.group_id}:{slot}"
        sampled = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = np.asarray([value for chunk in chunks for value in chunk.logprobs], np.float32)
        call = make_call(session_id, PROMPT, sampled, session_id=session_id, version=index, logprobs=logprobs)
        await store.open_session(make_session(session_id, group_id=group.group_id, slot=slot))
        await store.add_calls([call])
        await store.end_session(session_id, SessionStatus.COMPLETED, None, [])

    await asyncio.gather(*map(run_session, range(SESSIONS)))
    await store.close_group(group.group_id, GroupStatus.READY)


async def test_student_trained_on_reference_kl_approaches_teacher(tmp_path: Path) -> None:
    section = {
        "type": "engine",
        "model": {"name": str(tmp_path / "teacher"), "dtype": "fp32", "device": "cpu", "max_context": 128},
    }
    config = make_config(
        tmp_path / "run",
        make_tiny_model(tmp_path / "model", std=0.2),
        reference=section,
        advantage={"weight": 0},
        checkpoint_every=STEPS,
    )
    await train_teacher(config.model, tmp_path / "teacher")
    assert isinstance(config.trainer.reference, EngineReferenceConfig)
    backend = LocalBackend(config.model, LocalBackendConfig(threads=1))
    engine = LocalEngine(config.model, ENGINE)
    teacher = LocalEngine(config.trainer.reference.model, ENGINE)
    store = SqliteStore(config.store_path)
    await put_test_run(store)
    monitor = Monitor(config.run_dir, tensorboard=False)

    async def list_engines() -> list[Engine]:
        return [engine]

    trainer = Trainer(
        config,
        store=store,
        backend=backend,
        publisher=PolicyPublisher(FileSync(), list_engines),
        monitor=monitor,
        penalty=create_penalty(config, backend, teacher),
    )
    for step in range(STEPS):
        await sample_group(store, engine, step)
        batch = await trainer.batcher.next_batch(step + 1, 0, step)
        assert batch is not None
        await trainer.train_step(batch)
    monitor.close()
    for resource in (teacher, engine, backend, store):
        await resource.close()
    divergences = [record["reference_kl"] for record in read_steps(config.run_dir)]
    assert divergences[0] > 1
    assert mean(divergences[-2:]) < 0.7 * divergences[0], [round(value, 2) for value in divergences]
