"""Tests for the parts of the verl backend that work without verl: version checks and batch distribution."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from instar.backends.packages import check_installed
from instar.backends.verl.backend import VerlBackend
from instar.backends.verl.sharding import distribute_samples, gather_logprobs
from instar.config import ModelConfig, VerlBackendConfig
from instar.errors import ConfigError
from instar.types import Sample
from tests.unit.backends.conformance import make_sample, make_tree_samples


def test_verl_backend_without_verl_shows_install_command(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"verl>=0\.9\.1,<0\.10.*pip install.*backend\.python"):
        VerlBackend(ModelConfig(name=str(model_folder)), VerlBackendConfig())


@pytest.mark.parametrize(("version", "is_supported"), [("0.8.2", False), ("0.9.1", True), ("0.10.0", False)])
def test_check_installed_accepts_only_tested_versions(
    version: str, is_supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist_info = tmp_path / f"verl-{version}.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    expected_error = pytest.raises(ConfigError, match=f"{version} is installed")
    with nullcontext() if is_supported else expected_error:
        check_installed(VerlBackendConfig())


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 4, 12])
def test_distributed_samples_are_gathered_in_order(ranks: int, count: int) -> None:
    samples = make_tree_samples()[:count]
    shards = distribute_samples(samples, ranks, 64)
    assert sorted(i for indices in shards.indices for i in indices) == list(range(count))
    assert len({len(rows) for rows in shards.samples}) == 1, "ranks have different numbers of rows"
    padding_rows = [
        row
        for rows, indices in zip(shards.samples, shards.indices, strict=True)
        for row in rows[len(indices) :]
    ]
    assert all(not row.mask.any() for row in padding_rows)
    logprobs_by_rank = [[row.token_ids.astype(np.float32) for row in rows] for rows in shards.samples]
    for sample, actual in zip(samples, gather_logprobs(shards, logprobs_by_rank, samples), strict=True):
        np.testing.assert_array_equal(actual, sample.token_ids)


def test_distribute_samples_balances_tokens_across_ranks() -> None:
    rng = np.random.default_rng(0)
    samples: list[Sample] = [make_sample(str(n), [5] * int(n), 1) for n in rng.integers(2, 400, 64)]
    token_counts = [
        sum(len(row.token_ids) for row in rows) for rows in distribute_samples(samples, 4, 8192).samples
    ]
    assert max(token_counts) < 1.05 * min(token_counts)


def test_distribute_samples_increases_max_tokens_for_long_sample() -> None:
    samples = [make_sample("long", [5] * 300, 1), make_sample("short", [5] * 10, 1)]
    assert distribute_samples(samples, 2, 64).max_tokens == 300
    assert distribute_samples(samples, 2, 4096).max_tokens == 4096
