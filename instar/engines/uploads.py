"""Upload policy folders to an engine that cannot read them.

    POST /seen    {path, files}   → {seen}: true if this machine has the folder with these files
    POST /upload  a folder        → {path}: the path of the stored folder

``files`` maps names to size and modification time, which are equal on machines that share a file system. The
body of /upload is the length of the header (4 bytes, little-endian), the header (names and sizes as JSON),
the contents of the files, and the contents' SHA-256. A folder becomes visible only when it is complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import msgspec
from starlette.requests import ClientDisconnect, Request

from instar.errors import EngineError, EngineUnavailable

LENGTH_BYTES = 4
READ_BYTES = 4 * 2**20
MAX_HEADER_BYTES = 2**20
MAX_UPLOADS = 3
"""The number of uploaded folders to keep. Replies under an older policy may still need its files."""
FileStats = dict[str, tuple[int, int]]
"""The size in bytes and the modification time in nanoseconds of each file, by name."""


class FolderCheck(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    files: FileStats


class FolderCheckResult(msgspec.Struct):
    seen: bool


class UploadResult(msgspec.Struct):
    path: str


class _UploadHeader(msgspec.Struct, forbid_unknown_fields=True):
    files: list[tuple[str, int]]


def read_file_stats(folder: Path) -> FileStats:
    stats = {entry.name: entry.stat() for entry in sorted(folder.iterdir())}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


async def encode_folder(folder: Path, files: FileStats) -> AsyncGenerator[bytes, None]:
    header = msgspec.json.encode(_UploadHeader([(name, size) for name, (size, _) in files.items()]))
    yield len(header).to_bytes(LENGTH_BYTES, "little") + header
    digest = hashlib.sha256()
    for name in files:
        with (folder / name).open("rb") as file:
            while data := await asyncio.to_thread(file.read, READ_BYTES):
                digest.update(data)
                yield data
    yield digest.digest()


class UploadStore:
    """The folders that were uploaded to this process. They are deleted when it exits."""

    def __init__(self) -> None:
        self._root: str | None = None
        self._folders: list[Path] = []
        self.loaded_path = ""
        """The path of the served policy. Its folder is kept, because vLLM reads it again after a restart."""

    async def check_folder(self, check: FolderCheck) -> FolderCheckResult:
        try:
            files = await asyncio.to_thread(read_file_stats, Path(check.path))
            return FolderCheckResult(seen=files == check.files)
        except OSError:
            return FolderCheckResult(seen=False)

    async def receive_folder(self, request: Request) -> UploadResult:
        if self._root is None:
            self._root = tempfile.mkdtemp(prefix="instar-policies-")
            weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._root))
        try:
            await _write_folder(_UploadStream(request.stream()), partial)
            folder = partial.with_name(partial.name.removeprefix(".partial-"))
            await asyncio.to_thread(partial.rename, folder)
        except ClientDisconnect as error:
            raise EngineUnavailable("The client disconnected during the upload.") from error
        except OSError as error:
            raise EngineError(f"The policy's files cannot be written: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._folders.append(folder)
        while len(self._folders) > MAX_UPLOADS:
            oldest = next(folder for folder in self._folders if str(folder) != self.loaded_path)
            self._folders.remove(oldest)
            await asyncio.to_thread(shutil.rmtree, oldest, ignore_errors=True)
        return UploadResult(str(folder))


async def _write_folder(stream: _UploadStream, folder: Path) -> None:
    length = int.from_bytes(await stream.read(LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise EngineError(f"The upload header has {length} bytes; the maximum is {MAX_HEADER_BYTES}.")
    try:
        header = msgspec.json.decode(await stream.read(length), type=_UploadHeader)
    except msgspec.DecodeError as error:
        raise EngineError(f"The upload header cannot be read: {error}") from error
    digest = hashlib.sha256()
    for name, size in header.files:
        if name != Path(name).name or name in ("", ".."):
            raise EngineError(f"{name!r} is not a plain file name, so the file cannot be uploaded.")
        with (folder / name).open("xb") as file:
            async for data in stream.read_chunks(size):
                digest.update(data)
                await asyncio.to_thread(file.write, data)
    if await stream.read(digest.digest_size) != digest.digest():
        raise EngineError("The uploaded files do not match their SHA-256 hash; send them again.")


class _UploadStream:
    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self._unread = b""

    async def read(self, size: int) -> bytes:
        return b"".join([data async for data in self.read_chunks(size)])

    async def read_chunks(self, size: int) -> AsyncGenerator[bytes, None]:
        while size:
            if not self._unread:
                self._unread = await anext(self._stream, b"")
                if not self._unread:
                    raise EngineError(f"The upload is incomplete; at least {size} more bytes were expected.")
            data, self._unread = self._unread[:size], self._unread[size:]
            size -= len(data)
            yield data
