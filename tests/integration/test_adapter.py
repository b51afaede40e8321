"""Tests for runs with real processes that start from the adapter in `model.adapter`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from instar.backends.base import Backend
from instar.backends.factory import create_backend
from instar.cluster.live_run import serve_run
from instar.config import ModelConfig, RunConfig
from instar.conformance.batches import make_sample, make_tree_samples
from instar.engines.factory import connect_engines
from instar.protocol.base import ServiceLimits
from instar.store.sqlite import SqliteStore
from instar.types import Floats, Sample
from tests.integration.test_live_run import run_cli
from tests.sdk_leaks import IGNORE_SDK_LEAKS, collect_sdk_leaks
from tests.tiny import make_tiny_model
from tests.torture.run_process import RunProcess, make_config
from tests.unit.protocol.serving import serve_in_thread

KEY = "tml-test-key-0123456789"
pytestmark = [IGNORE_SDK_LEAKS, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden=32, context=2048)


@pytest.fixture(params=["tinker", "weaver"])
def service(
    request: pytest.FixtureRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Generator[dict[str, Any]]:
    """Serve a training service, and yield the backend section for it."""
    protocol = request.param
    monkeypatch.setenv(f"{protocol.upper()}_API_KEY", KEY)
    config = ModelConfig(name=str(model), dtype="fp32", device="cpu", max_context=2048)
    # The server keeps the models of closed backends.
    options = {"folder": tmp_path / "states", "base_model": "tiny", "limits": ServiceLimits(max_models=64)}
    with collect_sdk_leaks(), serve_in_thread(protocol, config, keys=[KEY], **options) as url:
        yield {"type": protocol, "base_url": url, "base_model": "tiny", "rank": 4, "deadline": 60}


def make_run(folder: Path, model: Path, adapter: str | None = None, **sections: Any) -> RunProcess:
    folder.mkdir()
    config = make_config(folder, model, steps=2)
    config["model"]["adapter"] = adapter
    return RunProcess(folder, {**config, "name": folder.name, **sections})


async def serve_logprobs(run: RunProcess, engine: str) -> list[Floats]:
    """Serve the model of a new run, and return the engine's logprobs of the samples."""
    settings = {name: run.config[name] for name in ("name", "dir", "model", "backend")}
    config = RunConfig.model_validate({**settings, "engine": engine})
    async with serve_run(config, log=print) as live:
        remote = await connect_engines(live.engine_urls, live.engine_token)
        assert (await remote.status()).version == 0
        logprobs = [await remote.logprobs(sample.token_ids) for sample in make_tree_samples()]
        await remote.close()
        return logprobs


async def compute_logprobs(run: RunProcess, *, use_adapter: bool) -> list[Floats]:
    """Return the logprobs of the samples under a run's last checkpoint, or under the base model."""
    settings = {name: run.config[name] for name in ("model", "backend")}
    backend: Backend = create_backend(RunConfig.model_validate(settings))
    await backend.load_state(run.run_dir / "checkpoints" / "step-000002" / "backend")
    compute = backend.forward if use_adapter else backend.reference_logprobs
    logprobs = await compute(make_tree_samples())
    await backend.close()
    return logprobs


async def assert_serves_adapter(served: list[Floats], source: RunProcess) -> None:
    expected = await compute_logprobs(source, use_adapter=True)
    base = await compute_logprobs(source, use_adapter=False)
    for actual, logprobs, base_logprobs in zip(served, expected, base, strict=True):
        np.testing.assert_allclose(actual, logprobs, atol=1e-4)
        assert np.nanmax(np.abs(actual - base_logprobs)) > 1e-3


async def test_engine_of_a_local_run_serves_the_adapter_as_version_0(model: Path, tmp_path: Path) -> None:
    first = make_run(tmp_path / "first", model)
    first.start()
    first.finish()
    backend = {"type": "local", "threads": 1}
    second = make_run(tmp_path / "second", model, f"run:{first.run_dir}", backend=backend)
    await assert_serves_adapter(await serve_logprobs(second, "local"), first)


async def test_run_on_a_service_starts_from_a_run_and_from_a_path(
    service: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    first = make_run(tmp_path / "first", model, backend=service)
    first.start()
    first.finish()
    state = json.loads((first.run_dir / "checkpoints/step-000002/backend/state.json").read_text())
    path = state["state" if service["type"] == "tinker" else "path"]

    for name, adapter in {"from_run": f"run:{first.run_dir}", "from_path": path}.items():
        served = make_run(tmp_path / name, model, adapter, backend=service)
        await assert_serves_adapter(await serve_logprobs(served, "cloud"), first)

    second = make_run(tmp_path / "second", model, path, backend=service)
    second.start()
    second.finish()
    versions = second.query("SELECT version, artifact_kind FROM policies ORDER BY version")
    assert versions == [(0, "remote"), (1, "remote"), (2, "remote")]


async def test_live_agent_on_a_service_is_answered_by_the_adapter_also_after_its_sampler_expires(
    service: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    first = make_run(tmp_path / "first", model, backend=service)
    first.start()
    first.finish()
    live = make_run(tmp_path / "live", model, f"run:{first.run_dir}", backend=service)
    for section in ("rollout", "reward", "engine"):
        del live.config[section]
    live = RunProcess(
        live.folder,
        live.config
        | {
            "backend": {**service, "sampler_ttl": 30},
            "data": "live",
            "agents": {"learner": {"mode": "learn"}},
            "live": {"gate": {"mode": "off"}, "replay": {"max_base_kl": None}},
        },
    )
    live.roles = ("engine", "gateway", "trainer")
    live.start()
    try:
        assert live.wait_until(live.is_ready), live.collect_logs()
        key = run_cli("keys", "create", live.run_dir, "--agent", "learner")["key"]
        (url,) = live.query("SELECT url FROM endpoints WHERE role = 'gateway'")[0]
        sql = "SELECT artifact_path FROM policies WHERE policy_id = 'live/learner' AND version = 0"
        path = live.query(sql)[0][0]
        before = await request_scores(live, url, key)
        assert live.wait_until(lambda: live.query(sql)[0][0] != path), live.collect_logs()
        await asyncio.sleep(12)  # the first sampler expires
        after = await request_scores(live, url, key)
    finally:
        live.kill_tree()
    for sample, logprobs in (before, after):
        settings = {name: first.config[name] for name in ("model", "backend")}
        backend: Backend = create_backend(RunConfig.model_validate(settings))
        await backend.load_state(first.run_dir / "checkpoints" / "step-000002" / "backend")
        expected, base = [(await f([sample]))[0] for f in (backend.forward, backend.reference_logprobs)]
        await backend.close()
        np.testing.assert_allclose(logprobs, expected[-len(logprobs) :], atol=1e-4)
        assert np.abs(logprobs - base[-len(logprobs) :]).max() > 1e-3


async def request_scores(run: RunProcess, url: str, key: str) -> tuple[Sample, Floats]:
    """Request a reply of version 0. Return its tokens and their logprobs."""
    body = {"model": "m", "messages": [{"role": "user", "content": "What is 6 + 7?"}], "max_tokens": 24}
    headers = {"Authorization": f"Bearer {key}"}
    response = await asyncio.to_thread(
        httpx.post, f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60
    )
    assert response.status_code == 200, response.text
    store = SqliteStore(run.run_dir / "store.db", read_only=True)
    (call,) = await store.calls_by_request(response.json()["id"])
    await store.close()
    assert set(call.versions.tolist()) == {0}
    return make_sample("reply", call.sequence.tolist(), len(call.prompt_ids)), call.logprobs
