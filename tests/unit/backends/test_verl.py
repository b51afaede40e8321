"""The verl backend as far as it goes without verl: what it refuses, and how batches are dealt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from instar.backends.verl.backend import VerlBackend, check_version
from instar.backends.verl.sharding import distribute_samples, gather_logprobs
from instar.config import ModelConfig, VerlBackendConfig
from instar.errors import ConfigError
from instar.types import Sample
from tests.unit.backends.conformance import make_sample, tree_samples


def test_without_verl_it_says_what_to_install(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"verl>=0\.9\.1,<0\.10.*backend\.python.*pip install"):
        VerlBackend(ModelConfig(name=str(model_folder)), VerlBackendConfig())


@pytest.mark.parametrize(("version", "fits"), [("0.8.2", False), ("0.9.1", True), ("0.10.0", False)])
def test_only_versions_that_were_tried_are_taken(
    version: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / f"verl-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    if fits:
        check_version()
        return
    with pytest.raises(ConfigError, match=f"{version} is installed"):
        check_version()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 4, 12])
def test_every_sample_is_dealt_once_and_comes_back_in_its_place(ranks: int, count: int) -> None:
    samples = tree_samples()[:count]
    share = distribute_samples(samples, ranks, 64)
    assert sorted(i for mine in share.indices for i in mine) == list(range(count))
    assert len({len(rows) for rows in share.samples}) == 1, "every rank has as many rows"
    filling = [
        row for rows, mine in zip(share.samples, share.indices, strict=True) for row in rows[len(mine) :]
    ]
    assert all(not row.mask.any() for row in filling)
    answers = [[row.token_ids.astype(np.float32) for row in rows] for rows in share.samples]
    for sample, found in zip(samples, gather_logprobs(share, answers, samples), strict=True):
        np.testing.assert_array_equal(found, sample.token_ids)


def test_ranks_have_about_as_many_tokens() -> None:
    rng = np.random.default_rng(0)
    samples: list[Sample] = [make_sample(str(n), [5] * int(n), 1) for n in rng.integers(2, 400, 64)]
    tokens = [
        sum(len(row.token_ids) for row in rows) for rows in distribute_samples(samples, 4, 8192).samples
    ]
    assert max(tokens) < 1.05 * min(tokens)


def test_a_long_sample_has_a_pass_to_itself() -> None:
    samples = [make_sample("long", [5] * 300, 1), make_sample("short", [5] * 10, 1)]
    assert distribute_samples(samples, 2, 64).max_tokens == 300
    assert distribute_samples(samples, 2, 4096).max_tokens == 4096
