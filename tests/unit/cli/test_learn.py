"""Tests of `instar learn` and of what `instar status` says about live learning."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from instar.cluster.layout import RunFolder
from instar.config import RunConfig
from instar.live.learning_window import read_opened
from instar.store.factory import open_store
from instar.types import Artifact, Endpoint, Policy
from tests.unit.cli.conftest import Instar, SmallRun
from tests.unit.data.builders import RUN, put_test_run
from tests.unit.data.test_live import POLICY, add_live, make_live_config


def make_run(folder: Path, **window: Any) -> Path:
    settings = make_live_config().model_dump(exclude_unset=True)
    config = RunConfig.model_validate({**settings, "dir": folder, "live": {"window": window}})
    RunFolder(folder).create(config)

    async def fill() -> None:
        store = open_store(config)
        await put_test_run(store)
        await add_live(store, "s1", 1.0)
        for step in (1, 2):
            await store.reserve_version(POLICY, RUN, step, parent=0, is_candidate=True)
        await store.publish(Policy(POLICY, 1, Artifact("adapter", "v1")))  # version 2 is not published yet
        await store.close()

    asyncio.run(fill())
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    hour = time.localtime().tm_hour
    return make_run(tmp_path / "run", hours=[f"{(hour + 6) % 24:02}:00-{(hour + 8) % 24:02}:00"])


def test_learn_now_opens_the_window_until_its_end(instar: Instar, run_dir: Path) -> None:
    started = time.time()
    state = instar("learn", "now", run_dir, "--for", "30m", "--json").json
    assert (state["open"], state["reason"]) == (True, "opened by `instar learn now`")
    assert started + 1800 <= state["until"] <= time.time() + 1800
    assert "window: open until" in instar("learn", "now", run_dir).out
    state = instar("learn", "now", run_dir, "--stop", "--json").json
    assert (state["open"], read_opened(run_dir)) == (False, None)
    assert "outside live.window.hours" in state["reason"]
    assert "window: opens" in instar("learn", "now", run_dir, "--stop").out


def test_learn_now_rejects_what_it_cannot_do(instar: Instar, run_dir: Path, small_run: SmallRun) -> None:
    result = instar("learn", "now", run_dir, "--for", "soon")
    assert result.code == 1
    assert "--for: 'soon' is not a duration" in result.err
    assert "does not learn from live traffic" in instar("learn", "now", small_run.folder).err


def test_status_of_a_stopped_run_says_what_it_learns_and_why_not_now(instar: Instar, run_dir: Path) -> None:
    report = instar("status", run_dir, "--json").json
    learning = report["learning"]
    assert learning["sessions"] == {"completed": 1}
    assert learning["policies"] == [
        {"policy_id": POLICY, "agents": ["default"], "serving": 0, "candidates": {"1": "candidate"}}
    ]
    assert learning["window"]["open"] is False
    assert learning["training"] == (
        "no, because no trainer is running; `instar train CONFIG --resume` starts it"
    )
    assert report["external"] == []
    output = instar("status", run_dir).out
    assert "serves version 0 (the base model), candidate version 1; learns from default" in " ".join(
        output.split()
    )
    assert max(map(len, output.splitlines())) <= 80


def test_status_of_a_run_without_live_data_has_no_window(instar: Instar, small_run: SmallRun) -> None:
    learning = instar("status", small_run.folder, "--json").json["learning"]
    assert (learning["window"], learning["policies"]) == (None, [])
    assert learning["training"] == "no, because `data` does not list `live`"


def test_status_lists_the_services_that_see_what_agents_say(instar: Instar, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    config = RunFolder(folder).read_config()
    settings = config.model_dump(mode="json", exclude_unset=True)
    settings["reward"] = {"type": "judge", "endpoint": "https://judge.example/v1", "model": "m"}
    settings["trainer"]["reference"] = {
        "type": "completions",
        "base_url": "https://teacher.example/v1",
        "model": "m",
    }
    RunFolder(folder).create(RunConfig.model_validate(settings))
    services = instar("status", folder, "--json").json["external"]
    assert [service["setting"] for service in services] == ["reward.0", "trainer.reference"]
    assert "https://teacher.example/v1 (trainer.reference)" in " ".join(instar("status", folder).out.split())


def test_status_of_a_failed_trainer_does_not_show_its_last_activity(instar: Instar, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")

    async def announce() -> None:
        store = open_store(RunFolder(folder).read_config())
        await store.put_endpoint(Endpoint(RUN, "trainer", "trainer", "", 1, "step 3: training", "", 0.0))
        await store.close()

    asyncio.run(announce())
    assert "no trainer is running" in instar("status", folder, "--json").json["learning"]["training"]
