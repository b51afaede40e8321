"""Test of a complete run that sends weights to two real vLLM servers through Ray's object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.vllm.servers import make_vllm_model
from tests.integration.vllm.test_run import (
    RUN_TIMEOUT_SECONDS,
    check_every_token,
    find_server_pids,
    make_run_settings,
)
from tests.torture.run_process import RunProcess

pytestmark = pytest.mark.timeout(900)


async def test_run_with_ray_sync_records_exact_logprobs(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    model = make_vllm_model(tmp_path / "model")
    config = make_run_settings(tmp_path, model, "merged", max_tokens=24, steps=3, mode="sync")
    run = RunProcess(tmp_path, config | {"sync": {"route": "ray", "chunk_mib": 1}})
    run.start()
    run.finish(RUN_TIMEOUT_SECONDS)
    run.assert_consistent()
    assert await check_every_token(run, model) == {0, 1, 2}
    log = (run.run_dir / "logs" / "trainer.log").read_text()
    assert f"sync route: ray: the object store of the cluster at {cluster}" in log
    assert "did not reach an engine" not in log
    assert not list(find_server_pids(run))
