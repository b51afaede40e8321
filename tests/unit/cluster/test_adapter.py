"""Tests for runs that start from the adapter in `model.adapter`."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instar.backends.local.backend import LocalBackend
from instar.backends.local.state import hash_adapter
from instar.cluster.adapter import make_initial_policy, prepare_adapter
from instar.cluster.layout import RunFolder
from instar.config import LocalBackendConfig, LoraConfig, RunConfig
from instar.conformance.batches import make_tree_samples
from instar.errors import ConfigError
from instar.store.sqlite import SqliteStore
from instar.trainer.checkpoint import checkpoint_path, load_initial_weights, policy_path
from instar.types import Artifact, Floats, Policy, StepState
from tests.tiny import make_tiny_model
from tests.unit.data.builders import RUN
from tests.unit.trainer.harness import (
    FaultInjector,
    SimulatedCrash,
    fill_store,
    make_config,
    open_trainer,
)

SOURCE_STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=32)


@pytest.fixture(scope="module")
def trained_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run with three committed versions, of which the last two have files."""
    config = make_config(tmp_path_factory.mktemp("runs") / "first", model, steps=SOURCE_STEPS)

    async def train() -> None:
        await fill_store(config)
        async with open_trainer(config) as harness:
            await harness.trainer.run()

    asyncio.run(train())
    RunFolder(config.run_dir).create(config)
    return config


@pytest.fixture
def source(trained_run: RunConfig, tmp_path: Path) -> RunConfig:
    """A copy of the trained run."""
    folder = shutil.copytree(trained_run.run_dir, tmp_path / "first")
    return trained_run.model_copy(update={"dir": folder})


def make_run(source: RunConfig, adapter: str, folder: str = "second", **sections: Any) -> RunConfig:
    """Return the config of a run next to ``source`` that starts from ``adapter``."""
    settings = source.model_dump(mode="json", include={"name", "engine", "trainer"})
    settings |= {"backend": {"type": "local", "threads": 1}, "dir": source.run_dir.parent / folder}
    settings["model"] = {**source.model.model_dump(), "adapter": adapter, **sections.pop("model", {})}
    return RunConfig.model_validate(settings | sections)


async def start_run(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Prepare the run's folder and store as `serve_run` does. Return the config and the log."""
    log: list[str] = []
    folder = RunFolder(config.run_dir)
    config = await prepare_adapter(config, folder, resume=False, log=log.append)
    folder.create(config)
    await fill_store(config)
    if policy := make_initial_policy(config):
        store = SqliteStore(config.store_path)
        await store.put_initial_policy(policy, config.name)
        await store.close()
    return config, log


async def make_adapter(model: Path, folder: Path, **lora: Any) -> str:
    """Publish an adapter with random weights, and return its folder."""
    config = LocalBackendConfig(threads=1, lora=LoraConfig(**lora))
    backend = LocalBackend(RunConfig.model_validate({"model": make_model(model)}).model, config)
    samples = make_tree_samples()
    await backend.forward_backward(samples, RunConfig().trainer.loss)
    await backend.optim_step(RunConfig().trainer.adam.model_copy(update={"lr": 0.05}))
    artifact = await backend.publish(folder)
    await backend.close()
    return artifact.path


def make_model(model: Path, **settings: Any) -> dict[str, Any]:
    return {"name": str(model), "dtype": "fp32", "device": "cpu", **settings}


async def compute_logprobs(config: RunConfig) -> list[Floats]:
    """Return the logprobs of some samples under the weights that the run starts from."""
    backend = LocalBackend(config.model, config.backend)  # pyright: ignore[reportArgumentType]
    await load_initial_weights(config, backend)
    logprobs = await backend.forward(make_tree_samples())
    await backend.close()
    return logprobs


# --- another run ----------------------------------------------------------------------------------


async def test_run_from_a_run_starts_with_its_weights_and_optimizer_state(source: RunConfig) -> None:
    config, log = await start_run(make_run(source, "run:first"))
    assert log == ["starting from the adapter run:run@3, with its optimizer state"]
    assert config.backend.lora == LoraConfig(rank=4, targets=config.backend.lora.targets)
    state = "state.safetensors"
    async with open_trainer(config) as harness:
        await harness.trainer.recover()
        await harness.backend.save_state(config.run_dir / "saved")
        policy = await harness.store.latest_policy(RUN)
        assert policy == Policy(RUN, 0, Artifact("adapter", str(config.run_dir / "initial" / "adapter")))
        assert hash_adapter(Path(policy.artifact.path)) == hash_adapter(policy_path(source.run_dir, 3))
    expected = (checkpoint_path(source.run_dir, SOURCE_STEPS) / "backend" / state).read_bytes()
    assert (config.run_dir / "saved" / state).read_bytes() == expected


@pytest.mark.parametrize(
    ("point", "occurrence"), [("forward_backward", 1), ("published", 1), ("optim_step", 2), ("saved", 2)]
)
async def test_run_from_a_run_after_a_crash_trains_like_an_uninterrupted_one(
    source: RunConfig, point: str, occurrence: int
) -> None:
    config, _ = await start_run(make_run(source, "run:first"))
    async with open_trainer(config) as harness:
        await harness.trainer.run()
        expected = await harness.hash_latest_adapter()
    config, _ = await start_run(make_run(source, "run:first", folder="crashed"))
    async with open_trainer(config, FaultInjector(point, occurrence)) as harness:
        with pytest.raises(SimulatedCrash):
            await harness.trainer.run()
    config = await prepare_adapter(config, RunFolder(config.run_dir), resume=True, log=print)
    async with open_trainer(config) as harness:
        await harness.trainer.run()
        assert await harness.hash_latest_adapter() == expected


async def test_run_from_a_version_starts_with_this_version(source: RunConfig) -> None:
    config, log = await start_run(make_run(source, f"run:{source.run_dir}@2"))
    assert log == ["starting from the adapter run:run@2, with its optimizer state"]
    assert hash_adapter(config.run_dir / "initial" / "adapter") == hash_adapter(
        policy_path(source.run_dir, 2)
    )


async def test_run_from_a_version_without_a_checkpoint_has_a_new_optimizer_state(source: RunConfig) -> None:
    checkpoint_path(source.run_dir, 2).rename(source.run_dir / "moved")
    _, log = await start_run(make_run(source, "run:first@2"))
    assert log == ["starting from the adapter run:run@2, without its optimizer state"]


async def test_run_from_a_run_that_started_from_an_adapter_can_use_version_0(source: RunConfig) -> None:
    await start_run(make_run(source, "run:first"))
    config, log = await start_run(make_run(source, "run:second", folder="third"))
    assert log == ["starting from the adapter run:run@0, with its optimizer state"]
    assert hash_adapter(config.run_dir / "initial" / "adapter") == hash_adapter(
        policy_path(source.run_dir, 3)
    )


async def test_initial_adapter_survives_the_removal_of_its_source(source: RunConfig) -> None:
    config, _ = await start_run(make_run(source, "run:first"))
    expected = await compute_logprobs(config)
    source.run_dir.rename(source.run_dir.with_name("gone"))
    config = await prepare_adapter(config, RunFolder(config.run_dir), resume=True, log=print)
    for x, y in zip(await compute_logprobs(config), expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ("run:first@1", r"run has no files of version 1, .*; available versions: 2, 3"),
        ("run:first@9", r"run has no files of version 9, .*; available versions: 2, 3"),
        ("run:missing", r"there is no run in .*missing or .*runs/missing; runs: first"),
        ("run:./missing", r"there is no run in missing"),
    ],
)
async def test_unknown_version_or_run_raises_config_error_with_what_exists(
    source: RunConfig, adapter: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await start_run(make_run(source, adapter))
    assert not (source.run_dir.parent / "second" / "config.json").exists()


async def test_run_trained_by_a_service_raises_config_error_for_another_backend(source: RunConfig) -> None:
    cloud = RunConfig.model_validate(
        {"name": "cloud", "dir": source.run_dir.parent / "cloud", "backend": "mint"}
    )
    RunFolder(cloud.run_dir).create(cloud)
    with pytest.raises(ConfigError, match=r"trained by the mint backend, but this run uses local"):
        await start_run(make_run(source, "run:cloud"))


async def test_run_that_trained_all_weights_raises_config_error(source: RunConfig) -> None:
    full = RunConfig.model_validate(
        {"name": "full", "dir": source.run_dir.parent / "full", "backend": {"type": "local", "lora": None}}
    )
    RunFolder(full.run_dir).create(full)
    with pytest.raises(ConfigError, match="full trained all weights"):
        await start_run(make_run(source, "run:full"))


# --- a folder -------------------------------------------------------------------------------------


async def test_run_from_a_folder_takes_its_settings_and_weights(
    source: RunConfig, model: Path, tmp_path: Path
) -> None:
    targets = ["q_proj", "v_proj"]
    adapter = await make_adapter(model, tmp_path / "adapter", rank=8, alpha=5.0, targets=targets)
    config, log = await start_run(make_run(source, adapter))
    assert log == [f"starting from the adapter {adapter}, without its optimizer state"]
    assert config.backend.lora == LoraConfig(rank=8, alpha=5.0, targets=targets)
    async with open_trainer(config) as harness:
        await harness.trainer.recover()
        published = await harness.backend.publish(tmp_path / "published")
        samples = make_tree_samples()
        logprobs = [await harness.backend.forward(samples), await harness.backend.reference_logprobs(samples)]
    assert hash_adapter(Path(published.path)) == hash_adapter(Path(adapter))
    assert max(np.nanmax(np.abs(x - y)) for x, y in zip(*logprobs, strict=True)) > 0.1


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 16}, r"backend\.lora\.rank: got 16, but .*adapter has 8"),
        ({"alpha": 2}, r"backend\.lora\.alpha: got 2\.0, but .*adapter has 5\.0"),
        ({"targets": ["q_proj"]}, r"backend\.lora\.targets: got \['q_proj'\], but .*\['q_proj', 'v_proj'\]"),
    ],
)
async def test_setting_that_differs_from_the_adapter_raises_config_error(
    source: RunConfig, model: Path, tmp_path: Path, lora: dict[str, Any], message: str
) -> None:
    adapter = await make_adapter(model, tmp_path / "adapter", rank=8, alpha=5.0, targets=["v_proj", "q_proj"])
    with pytest.raises(ConfigError, match=message):
        await start_run(make_run(source, adapter, backend={"type": "local", "lora": lora}))
    same = {"rank": 8, "alpha": 5, "targets": ["q_proj", "v_proj"]}
    await start_run(make_run(source, adapter, backend={"type": "local", "lora": same}))


async def test_adapter_of_another_model_raises_config_error_with_both_names(
    source: RunConfig, model: Path, tmp_path: Path
) -> None:
    adapter = await make_adapter(model, tmp_path / "adapter")
    other = make_tiny_model(tmp_path / "other", hidden=32)
    with pytest.raises(ConfigError, match=r"model\.name: got .*other', but .* was trained on .*tiny'"):
        await start_run(make_run(source, adapter, model={"name": str(other)}))


async def test_folder_without_an_adapter_raises_config_error(source: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.adapter: The adapter in .* cannot be read"):
        await start_run(make_run(source, str(tmp_path)))


async def test_resume_with_another_adapter_raises_config_error(
    source: RunConfig, model: Path, tmp_path: Path
) -> None:
    config, _ = await start_run(make_run(source, "run:first"))
    folder = RunFolder(config.run_dir)
    for adapter in (None, "run:first@2"):
        changed = config.model_copy(update={"model": config.model.model_copy(update={"adapter": adapter})})
        with pytest.raises(
            ConfigError, match=r"model\.adapter: got .*, but this run started from 'run:first'"
        ):
            await prepare_adapter(changed, folder, resume=True, log=print)


@pytest.mark.parametrize(
    ("adapter", "sections", "message"),
    [
        (
            "tinker://model/weights/name",
            {},
            r"the local backend can start only from a PEFT folder or run:NAME",
        ),
        ("folder", {"backend": "tinker"}, r"the tinker backend can start only from a tinker:// path or run:"),
        ("tinker://model/weights/name", {"backend": "weaver"}, r"only from a weaver:// path or run:NAME"),
        ("run:first", {"backend": "verl"}, r"run:run@3 has no training state of the verl backend"),
        ("folder", {"backend": "verl"}, r"the verl backend can start only from run:NAME"),
        ("run:first", {"backend": {"type": "local", "lora": None}}, r"but backend\.lora is null"),
        ("run:first", {"engine": {"type": "upstream", "base_url": "http://host/v1"}}, r"a provider serves"),
    ],
)
async def test_adapter_that_the_backend_or_engine_cannot_use_raises_config_error(
    source: RunConfig, adapter: str, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await start_run(make_run(source, adapter, **sections))


async def test_run_without_a_version_starts_from_the_one_that_a_live_run_serves(
    source: RunConfig, tmp_path: Path
) -> None:
    store = SqliteStore(source.store_path)
    rows = {row.policy.version: row for row in await store.policy_versions(RUN)}
    served, rejected = rows[2].policy, rows[3].policy
    for policy in (served, rejected):
        version = await store.reserve_version(RUN, RUN, SOURCE_STEPS, parent=3, is_candidate=True)
        await store.publish(Policy(RUN, version, policy.artifact))
    await store.promote_version(RUN, 4)
    config, log = await start_run(make_run(source, "run:first"))  # version 5 is a candidate
    assert f"run:{RUN}@4" in log[0]
    assert hash_adapter(config.run_dir / "initial" / "adapter") == hash_adapter(
        policy_path(source.run_dir, 2)
    )
    await store.promote_version(RUN, 5)
    assert await store.roll_back(RUN, RUN, 4) == 6  # the new version has the files of an earlier one
    await store.close()
    for number, adapter in enumerate(("run:first", "run:first@6")):
        config, log = await start_run(make_run(source, adapter, folder=f"rolled-back-{number}"))
        assert f"run:{RUN}@6" in log[0]
        initial = config.run_dir / "initial" / "adapter"
        assert hash_adapter(initial) == hash_adapter(policy_path(source.run_dir, 2))


async def test_run_from_a_live_run_starts_with_the_policy_of_the_chosen_agent(
    model: Path, tmp_path: Path
) -> None:
    settings = make_config(tmp_path / "first", model).model_dump(exclude_unset=True)
    agents = {agent: {"mode": "learn"} for agent in ("a", "b")}
    source = RunConfig.model_validate({**settings, "data": "live", "agents": agents})
    RunFolder(source.run_dir).create(source)
    store = SqliteStore(source.store_path)
    for seed, agent in enumerate(agents):
        policy_id = source.get_policy_id(agent)
        await store.claim_step(policy_id, 1, [], run_id=RUN)
        version = await store.reserve_version(policy_id, RUN, 1, parent=0, is_candidate=True)
        folder = policy_path(source.get_policy_dir(policy_id), version)
        await make_adapter(model, folder, rank=4 + seed)
        await store.publish(Policy(policy_id, version, Artifact("adapter", str(folder))))
        await store.advance_step(policy_id, 1, StepState.COMMITTED, version=version)
        await store.promote_version(policy_id, version)
    await store.close()
    for agent in agents:
        config, log = await start_run(make_run(source, f"run:first/{agent}", folder=f"from-{agent}"))
        assert f"run:{RUN}/{agent}@1" in log[0]
        expected = hash_adapter(policy_path(source.get_policy_dir(f"{RUN}/{agent}"), 1))
        assert hash_adapter(config.run_dir / "initial" / "adapter") == expected
    with pytest.raises(ConfigError, match="a policy for each learning agent; choose run:run/a or run:run/b"):
        await start_run(make_run(source, "run:first"))
    with pytest.raises(ConfigError, match="has no policy of the agent 'c'; agents with a policy: a, b"):
        await start_run(make_run(source, f"run:{source.run_dir}/c"))
