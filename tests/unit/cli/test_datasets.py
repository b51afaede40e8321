"""Tests for `instar sessions export` and `import`, `instar datasets` and pinned dataset versions."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from instar.cluster.data import pin_data
from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.errors import ConfigError
from instar.store.factory import open_store
from instar.types import SessionStatus
from tests.unit.cli.conftest import Instar
from tests.unit.data.builders import RUN, make_call, make_session
from tests.unit.datasets.harness import fill_store


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / RUN
    config = RunConfig(name=RUN, dir=folder)
    RunFolder(folder).create(config)

    async def create_store() -> None:
        store = open_store(config)
        await fill_store(store)
        await store.close()

    asyncio.run(create_store())
    return folder


def test_exported_sessions_can_be_imported(instar: Instar, run_dir: Path, tmp_path: Path) -> None:
    output = instar("sessions", "export", run_dir, "--to", tmp_path / "out", "--json").json
    assert output["counts"]["sessions"] == 8
    assert output["path"] == str(tmp_path / "out")
    imported = instar("sessions", "import", tmp_path / "out", "--run", "copy", "--json").json
    assert (imported["run_dir"], imported["sessions"]) == ("runs/copy", 8)
    repeated = instar("sessions", "import", tmp_path / "out", "--into", "runs/copy", "--json").json
    assert repeated["unchanged"] == 8
    ids = [
        [row["session_id"] for row in instar("sessions", "ls", folder, "--json").json]
        for folder in (run_dir, "runs/copy")
    ]
    assert set(ids[0]) - set(ids[1]) == {"open"}
    sessions = [
        instar("sessions", "show", folder, "s1-0", "--json").json for folder in (run_dir, "runs/copy")
    ]
    assert sessions[0] == sessions[1]
    exported = instar("sessions", "export", "runs/copy", "--to", tmp_path / "again", "--json").json
    # The content hash differs, because every row contains the name of the run.
    assert exported["counts"] == output["counts"]


def test_lone_surrogate_can_be_shown_and_curated(instar: Instar, run_dir: Path) -> None:
    result = instar("sessions", "show", run_dir, "odd")
    assert (result.code, "half ? a pair" in result.out) == (0, True)
    assert instar("curate", run_dir, "--json").json["sessions"] == 7


def test_export_applies_filters(instar: Instar, run_dir: Path, tmp_path: Path) -> None:
    output = instar(
        "sessions",
        "export",
        run_dir,
        "--to",
        tmp_path / "out",
        "--reward-min",
        "1",
        "--channel",
        "train",
        "--json",
    ).json
    assert output["filters"] == {"channel": "train", "reward_min": 1.0}
    assert output["counts"]["sessions"] == 3


def test_dataset_names_have_versions(instar: Instar, run_dir: Path, tmp_path: Path) -> None:
    first = instar("sessions", "export", run_dir, "--as", "golden", "--json").json
    assert (first["dataset"], first["version"]) == ("golden", 1)
    assert instar("sessions", "export", run_dir, "--as", "golden", "--json").json["version"] == 1
    rewarded = instar("sessions", "export", run_dir, "--as", "golden", "--reward-min", "1", "--json").json
    assert rewarded["version"] == 2
    assert Path(rewarded["path"]).parent == tmp_path / "runs" / "datasets"
    rows = instar("datasets", "ls", "--json").json
    assert [(row["name"], row["version"]) for row in rows] == [("golden", 1), ("golden", 2)]
    assert "golden@2" in instar("datasets", "ls").out
    assert instar("datasets", "show", "golden@1", "--json").json["manifest"]["hash"] == first["hash"]
    assert instar("datasets", "add", "other", first["path"], "--json").json["version"] == 1
    assert instar("datasets", "rm", "golden@1", "--files", "--json").json == {"removed": ["golden@1"]}
    assert Path(first["path"]).is_dir(), "another dataset uses the same folder"
    instar("datasets", "rm", "other", "--files")
    assert not Path(first["path"]).exists()
    result = instar("datasets", "show", "golden@1")
    assert (result.code, result.err.strip()) == (
        1,
        "error: Unknown dataset 'golden@1'. Available: golden@2",
    )


def test_pinned_run_keeps_its_dataset_version(instar: Instar, run_dir: Path) -> None:
    first = instar("sessions", "export", run_dir, "--as", "golden", "--json").json
    config = RunConfig.model_validate({"name": "next", "data": "dataset:golden"})
    pinned = asyncio.run(pin_data(config))
    assert (pinned.data[0].source, pinned.data[0].content) == ("dataset:golden@1", first["hash"])
    instar("sessions", "export", run_dir, "--as", "golden", "--reward-min", "1")
    assert asyncio.run(pin_data(config)).data[0].source == "dataset:golden@2"
    assert asyncio.run(pin_data(config, previous=pinned.data)) == pinned
    folder_config = RunConfig.model_validate({"name": "next", "data": first["path"]})
    assert asyncio.run(pin_data(folder_config)).data[0].label == first["hash"][7:19]


def test_resumed_run_keeps_dataset_versions_in_order(instar: Instar, run_dir: Path) -> None:
    def make_config(*sources: str) -> RunConfig:
        data = [{"source": source, "share": 1 / len(sources)} for source in sources]
        return RunConfig.model_validate({"name": "next", "data": data})

    def get_sources(config: RunConfig) -> list[str]:
        return [section.source for section in config.data]

    instar("sessions", "export", run_dir, "--as", "golden")
    instar("sessions", "export", run_dir, "--as", "golden", "--reward-min", "1")
    config = make_config("dataset:golden", "dataset:golden@1")
    pinned = asyncio.run(pin_data(config))
    assert get_sources(pinned) == ["dataset:golden@2", "dataset:golden@1"]
    instar("sessions", "export", run_dir, "--as", "golden", "--reward-max", "0")
    assert asyncio.run(pin_data(config, previous=pinned.data)) == pinned
    swapped = make_config("dataset:golden@1", "dataset:golden")
    resumed = asyncio.run(pin_data(swapped, previous=pinned.data))
    assert get_sources(resumed) == ["dataset:golden@1", "dataset:golden@2"]
    other = asyncio.run(pin_data(make_config("dataset:golden@3"), previous=pinned.data))
    assert get_sources(other) == ["dataset:golden@3"], "the config requests a different version"


@pytest.mark.parametrize("second", ["dataset:golden@1", "./out"])
def test_repeated_dataset_is_rejected(instar: Instar, run_dir: Path, second: str) -> None:
    instar("sessions", "export", run_dir, "--to", "out", "--as", "golden")
    first = "dataset:golden" if second.startswith("dataset:") else "out"
    data = [{"source": source, "share": 0.5} for source in (first, second)]
    with pytest.raises(ConfigError, match=f"'{first}' and '{second}' are the same data"):
        asyncio.run(pin_data(RunConfig.model_validate({"name": "next", "data": data})))


def test_dataset_folder_matches_format_and_samples(instar: Instar, run_dir: Path) -> None:
    options = [(), ("--format", "parquet"), ("--samples",), ()]
    exports = [
        instar("sessions", "export", run_dir, "--as", "golden", *arguments, "--json").json
        for arguments in options
    ]
    assert {export["version"] for export in exports} == {1}, "the content is the same"
    names = [sorted(file.name for file in Path(export["path"]).iterdir()) for export in exports]
    assert "calls.jsonl" in names[0]
    assert "calls.parquet" in names[1]
    assert "samples.jsonl" in names[2]
    assert (exports[3]["path"], names[3]) == (exports[0]["path"], names[0])
    dataset = instar("datasets", "show", "golden", "--json").json
    assert dataset["path"] == exports[3]["path"]


def test_export_samples_without_logprobs_succeeds(instar: Instar, run_dir: Path, tmp_path: Path) -> None:
    async def add_session() -> None:
        store = open_store(RunFolder(run_dir).read_config())
        await store.open_session(make_session("no-logprobs"))
        call = make_call(
            "no-logprobs#0", [1], [2], session_id="no-logprobs", logprobs=np.array([np.nan], np.float32)
        )
        await store.add_calls([call])
        await store.end_session("no-logprobs", SessionStatus.COMPLETED)
        await store.close()

    asyncio.run(add_session())
    output = instar("sessions", "export", run_dir, "--to", tmp_path / "out", "--samples")
    assert (output.code, output.err) == (0, "")
    lines = (tmp_path / "out" / "samples.jsonl").read_text().split("\n")
    rows = [json.loads(line) for line in lines if line]
    (row,) = [row for row in rows if row["session_id"] == "no-logprobs"]
    assert (row["mask"], row["logprobs"]) == ([0, 1], [None, None])


def test_missing_dataset_is_reported(instar: Instar, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.source: unknown dataset 'dataset:missing'\. .*: none"):
        asyncio.run(pin_data(RunConfig.model_validate({"data": "dataset:missing"})))
    with pytest.raises(
        ConfigError, match=r"data\.source: cannot use '/missing': .*manifest\.json is missing"
    ):
        asyncio.run(pin_data(RunConfig.model_validate({"data": "/missing"})))


def test_export_sft_and_dpo_formats(instar: Instar, run_dir: Path, tmp_path: Path) -> None:
    instar("sessions", "export", run_dir, "--to", tmp_path / "sft", "--format", "sft", "--reward-min", "1")
    rows = [json.loads(line) for line in (tmp_path / "sft" / "messages.jsonl").read_text().splitlines()]
    assert len(rows) == 3, "one session of each group; the session with a failed score is excluded"
    assert rows[1]["messages"][2]["tool_calls"][0]["function"] == {"name": "search", "arguments": {"q": "ä"}}
    assert json.loads(rows[1]["tools"])[0]["function"]["name"] == "search"
    completions = (tmp_path / "sft" / "prompt_completion.jsonl").read_text().splitlines()
    assert json.loads(completions[-1])["completion"] == [{"role": "assistant", "content": "two"}], (
        "the correction replaces the reply"
    )
    instar("sessions", "export", run_dir, "--to", tmp_path / "dpo", "--format", "dpo")
    (pair, *others) = [
        json.loads(line) for line in (tmp_path / "dpo" / "pairs.jsonl").read_text().splitlines()
    ]
    assert len(others) == 2
    assert [message["content"] for message in pair["prompt"]] == ["Be brief.", "Q"]
    assert pair["chosen"] == [{"role": "assistant", "content": "answer 1"}]
    assert pair["rejected"] == [{"role": "assistant", "content": "answer 0"}]
    assert [message["role"] for message in others[0]["prompt"]] == ["system", "user", "assistant", "tool"]
    rejected = instar("sessions", "import", tmp_path / "dpo")
    assert rejected.code == 1
    assert "has the format dpo" in rejected.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--format", "jsonl"), "Set a folder with --to"),
        (("--as", "x", "--format", "sft"), "--as: Instar cannot import sft data"),
        (("--as", "a b"), "is not a valid name; names must start"),
        (("--to", "out", "--task", "none"), "nothing to export"),
    ],
)
def test_export_with_invalid_options_explains_the_error(
    instar: Instar, run_dir: Path, arguments: tuple[str, ...], expected: str
) -> None:
    result = instar("sessions", "export", run_dir, *arguments)
    assert result.code == 1
    assert expected in result.err
