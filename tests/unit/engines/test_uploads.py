"""Tests for uploading policy folders to an engine that cannot read them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from instar.config import ModelConfig, ScriptedEngineConfig
from instar.engines.remote import RemoteEngine
from instar.engines.scripted import ScriptedEngine
from instar.engines.uploads import MAX_UPLOADS
from instar.errors import EngineError
from instar.sync.files import FileSync
from instar.types import Artifact, Policy
from tests.unit.engines.test_conformance import serve_engine


class RecordingEngine(ScriptedEngine):
    """Records the folders that it loads and their files."""

    def __init__(self, model: ModelConfig, config: ScriptedEngineConfig) -> None:
        super().__init__(model, config)
        self.loaded_files: list[dict[str, bytes]] = []
        self.loaded_folders: list[Path] = []

    async def load(self, policy: Policy) -> None:
        folder = Path(policy.artifact.path)
        self.loaded_folders.append(folder)
        self.loaded_files.append(read_files(folder))
        await super().load(policy)


class RemoteEngineWithoutSharedDisk(RemoteEngine):
    """Simulates a client whose folders the engine cannot read."""

    async def _call(self, method: str, path: str, timeout: float, body: object = None) -> bytes:
        if path == "/seen":
            return b'{"seen": false}'
        return await super()._call(method, path, timeout, body)  # type: ignore[arg-type]


@pytest.fixture
def engine(tiny_model: Path) -> RecordingEngine:
    return RecordingEngine(ModelConfig(name=str(tiny_model)), ScriptedEngineConfig())


@pytest.fixture
async def url(engine: RecordingEngine) -> AsyncIterator[str]:
    async with serve_engine(engine, None) as url:
        yield url


def write_policy(folder: Path, version: int) -> Policy:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 4}')
    (folder / "adapter_model.safetensors").write_bytes(os.urandom(9_000_000))
    (folder / "empty").write_bytes(b"")
    return Policy("p", version, Artifact("adapter", str(folder)))


def read_files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


async def test_push_does_not_upload_a_folder_that_the_engine_can_read(
    engine: RecordingEngine, url: str, tmp_path: Path
) -> None:
    remote = await RemoteEngine.connect(url)
    policy = write_policy(tmp_path / "v1", 1)
    assert await FileSync().push(policy, [remote]) == [None]
    assert engine.loaded_folders == [tmp_path / "v1"]
    await remote.close()


async def test_seen_is_false_for_a_folder_with_different_files(url: str, tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "v1", 1)
    body = {"path": policy.artifact.path, "files": {"adapter_config.json": [8, 1]}}
    async with aiohttp.ClientSession() as client, client.post(f"{url}/seen", json=body) as response:
        assert await response.json() == {"seen": False}


async def test_push_uploads_unreadable_folders_and_deletes_old_uploads(
    engine: RecordingEngine, url: str, tmp_path: Path
) -> None:
    remote = RemoteEngineWithoutSharedDisk(url)
    await remote.refresh()
    for version in range(1, MAX_UPLOADS + 3):
        policy = write_policy(tmp_path / f"v{version}", version)
        assert await FileSync().push(policy, [remote]) == [None]
        assert engine.loaded_files[-1] == read_files(tmp_path / f"v{version}")
        assert not engine.loaded_folders[-1].is_relative_to(tmp_path)
        assert (await engine.status()).version == version
    assert [path.is_dir() for path in engine.loaded_folders] == [False] * 2 + [True] * MAX_UPLOADS
    assert sorted(engine.loaded_folders[-1].parent.iterdir()) == sorted(engine.loaded_folders[-MAX_UPLOADS:])
    await remote.close()


async def test_uploads_keep_the_served_folder_until_another_is_loaded(
    engine: RecordingEngine, url: str, tmp_path: Path
) -> None:
    remote = RemoteEngineWithoutSharedDisk(url)
    await remote.refresh()
    assert await FileSync().push(write_policy(tmp_path / "v1", 1), [remote]) == [None]
    uploaded = [
        await remote.upload_files(write_policy(tmp_path / f"v{version}", version))
        for version in range(2, MAX_UPLOADS + 3)
    ]
    assert engine.loaded_files[0] == read_files(engine.loaded_folders[0])
    assert len(list(engine.loaded_folders[0].parent.iterdir())) == MAX_UPLOADS
    await remote.load(uploaded[-1])
    await remote.upload_files(write_policy(tmp_path / "last", 9))
    assert not engine.loaded_folders[0].exists()
    await remote.close()


def encode_upload(files: list[tuple[str, int]], content: bytes, digest: bytes | None = None) -> bytes:
    header = json.dumps({"files": files}).encode()
    return b"".join(
        [len(header).to_bytes(4, "little"), header, content, digest or hashlib.sha256(content).digest()]
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (encode_upload([("a", 5)], b"12345", b"x" * 32), "SHA-256"),
        (encode_upload([("a", 9)], b"12345"), "incomplete"),
        (encode_upload([("a", 99)], b"12345"), "incomplete"),
        (encode_upload([("../a", 5)], b"12345"), "not a plain file name"),
        (encode_upload([("..", 5)], b"12345"), "not a plain file name"),
        (encode_upload([("/tmp/a", 5)], b"12345"), "not a plain file name"),
        (b"\xff\xff\xff\xff", "has 4294967295 bytes"),
        (b"\x02\x00\x00\x00[]", "cannot be read"),
    ],
)
async def test_upload_leaves_no_files_if_the_body_is_invalid(url: str, body: bytes, message: str) -> None:
    remote = await RemoteEngine.connect(url)
    with pytest.raises(EngineError, match=message):
        await remote._call("POST", "/upload", 10.0, body)
    response = await remote._call("POST", "/upload", 10.0, encode_upload([("a", 5)], b"12345"))
    folder = Path(json.loads(response)["path"])
    assert read_files(folder) == {"a": b"12345"}
    assert list(folder.parent.iterdir()) == [folder]
    await remote.close()
