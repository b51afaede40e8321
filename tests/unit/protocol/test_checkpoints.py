"""Tests that checkpoints are complete or absent, are found only by their owner, and expire."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import pytest

from instar.errors import ConfigError
from instar.protocol.base import CheckpointInfo, ProtocolError
from instar.protocol.checkpoints import SCRATCH_FOLDER, CheckpointStore

STATE = CheckpointInfo(
    "", "state", "model-1", "tiny", 8, 0.0, 0, has_optimizer=True, extra={"train_mlp": True}
)
SAMPLER = CheckpointInfo("", "sampler", "model-1", "tiny", 8, 0.0, 0)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Generator[CheckpointStore]:
    with closing(CheckpointStore(tmp_path / "data")) as store:
        yield store


async def write_checkpoint(
    checkpoints: CheckpointStore,
    name: str,
    content: str = "weights",
    *,
    owner: str = "me",
    ttl: float | None = None,
) -> CheckpointInfo:
    async def fill(folder: Path) -> None:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "file").write_text(content)

    return await checkpoints.write(owner, name, STATE, fill, ttl=ttl)


async def test_checkpoints_are_written_and_deleted_after_the_scratch_folder_is_removed(
    checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "data" / SCRATCH_FOLDER, ignore_errors=True)
    info = await write_checkpoint(checkpoints, "step-1")
    shutil.rmtree(tmp_path / "data" / SCRATCH_FOLDER)
    checkpoints.delete(info.path, "me")
    assert checkpoints.list_checkpoints("me") == []


async def test_checkpoint_store_finds_checkpoints_after_restart(
    checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    info = await write_checkpoint(checkpoints, "step-1")
    assert info.path == "tinker://model-1/weights/step-1"
    assert info.size_bytes == len("weights")
    assert abs(info.created_at - time.time()) < 5

    with pytest.raises(ConfigError, match="in use by another server"):
        CheckpointStore(tmp_path / "data")
    checkpoints.close()
    with closing(CheckpointStore(tmp_path / "data")) as reopened:
        assert reopened.find(info.path, "me") == info
        assert reopened.find("weaver://model-1/weights/step-1", "me") == info
        assert (reopened.get_folder(info) / "adapter" / "file").read_text() == "weights"
        assert reopened.list_checkpoints("me") == [info]
        assert reopened.list_checkpoints("me", "model-2") == []


async def test_state_and_sampler_may_share_a_name(checkpoints: CheckpointStore) -> None:
    async def fill(folder: Path) -> None:
        (folder / "file").write_text("sampler")

    sampler = await checkpoints.write("me", "one", SAMPLER, fill, ttl=None)
    state = await write_checkpoint(checkpoints, "one")
    assert sampler.path == "tinker://model-1/sampler_weights/one"
    assert [info.kind for info in checkpoints.list_checkpoints("me")] == ["sampler", "state"]
    assert checkpoints.get_folder(sampler) != checkpoints.get_folder(state)


async def test_checkpoint_with_the_same_name_is_replaced(checkpoints: CheckpointStore) -> None:
    first = await write_checkpoint(checkpoints, "latest", "old")
    second = await write_checkpoint(checkpoints, "latest", "new")
    assert second.created_at > first.created_at
    assert (checkpoints.get_folder(second) / "adapter" / "file").read_text() == "new"
    assert checkpoints.list_checkpoints("me") == [second]


async def test_checkpoint_of_another_owner_is_not_found(checkpoints: CheckpointStore) -> None:
    info = await write_checkpoint(checkpoints, "mine")
    for method in (checkpoints.find, checkpoints.delete):
        with pytest.raises(ProtocolError) as caught:
            method(info.path, "you")
        assert caught.value.status == 404
    assert checkpoints.list_checkpoints("you") == []
    assert checkpoints.find(info.path, "me")


async def test_expired_checkpoints_are_not_found(checkpoints: CheckpointStore) -> None:
    info = await write_checkpoint(checkpoints, "short", ttl=0.5)
    assert checkpoints.find(info.path, "me").expires_at == pytest.approx(info.created_at + 0.5)
    kept = await write_checkpoint(checkpoints, "long", ttl=60)
    await asyncio.sleep(max(0.0, info.created_at + 0.5 - time.time()))
    with pytest.raises(ProtocolError, match="was not found or has expired"):
        checkpoints.find(info.path, "me")
    assert checkpoints.list_checkpoints("me") == [kept]
    checkpoints.remove_expired()
    assert not checkpoints.get_folder(info).exists()
    assert checkpoints.get_folder(kept).exists()


async def test_deleted_checkpoint_is_removed_from_disk(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    info = await write_checkpoint(checkpoints, "deleted")
    checkpoints.delete(info.path, "me")
    assert not checkpoints.get_folder(info).exists()
    checkpoints.close()
    with closing(CheckpointStore(tmp_path / "data")) as reopened:
        assert reopened.list_checkpoints("me") == []


async def test_interrupted_write_keeps_the_previous_checkpoint(
    checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    info = await write_checkpoint(checkpoints, "latest", "old")

    async def fail(folder: Path) -> None:
        (folder / "file").write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        await checkpoints.write("me", "latest", STATE, fail, ttl=None)
    checkpoints.close()
    leftover = tmp_path / "data" / ".scratch" / "half-written"
    leftover.mkdir(parents=True)

    with closing(CheckpointStore(tmp_path / "data")) as reopened:
        assert reopened.list_checkpoints("me") == [info]
        assert (reopened.get_folder(info) / "adapter" / "file").read_text() == "old"
        assert not leftover.exists()


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "../up", "a\\b", "a\0", "a\n", "é", "x" * 129]
)
async def test_invalid_checkpoint_names_are_rejected(
    checkpoints: CheckpointStore, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ProtocolError, match="invalid checkpoint name"):
        await write_checkpoint(checkpoints, name)
    assert not any("file" in files for _, _, files in os.walk(tmp_path))


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "tinker://m/weights/../x", "tinker://../weights/x", "tinker://m/other/x", "x", ""]
)
async def test_invalid_checkpoint_paths_are_rejected(checkpoints: CheckpointStore, path: str) -> None:
    with pytest.raises(ProtocolError):
        checkpoints.find(path, "me")


async def test_checkpoint_ttl_must_be_positive(checkpoints: CheckpointStore) -> None:
    with pytest.raises(ProtocolError, match="must be greater than 0"):
        await write_checkpoint(checkpoints, "x", ttl=0)


async def test_damaged_checkpoint_does_not_hide_the_others(
    checkpoints: CheckpointStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, intact = (
        await write_checkpoint(checkpoints, "step-1"),
        await write_checkpoint(checkpoints, "step-2"),
    )
    (checkpoints.get_folder(damaged) / "checkpoint.json").write_text("{")
    checkpoints.close()
    with closing(CheckpointStore(tmp_path / "data")) as reopened:
        assert reopened.list_checkpoints("me") == [intact]
    assert "step-1/checkpoint.json cannot be read" in caplog.text
