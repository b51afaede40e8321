"""Policies' folders that are sent to an engine on a machine which does not see them.

    POST /seen    {path, files}   → {seen}: whether that folder is here, with these files
    POST /upload  a folder        → {path}: where it lies now

``files`` maps names to size and time of change, which are the same for all that share a file system. The
body of /upload is, one after the other: 4 bytes, little-endian, the length of what follows; as JSON, names
and sizes of the files; their contents; the SHA-256 of all contents. It is written as it comes, and a folder
is there whole or not at all. Old ones go.
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
from starlette.responses import Response

from instar.errors import EngineError, EngineUnavailable

LENGTH_BYTES = 4
PIECE = 4 * 2**20
LARGEST_HEAD = 2**20
MAX_UPLOADS = 3
"""Uploads that are kept: replies under an older policy may still need its files."""
FileStats = dict[str, tuple[int, int]]
"""Size and time of change, by name."""


class FolderCheck(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    files: FileStats


class FolderCheckResult(msgspec.Struct):
    seen: bool


class UploadResult(msgspec.Struct):
    path: str


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    files: list[tuple[str, int]]


def read_file_stats(folder: Path) -> FileStats:
    """Raises OSError where there is no such folder."""
    found: FileStats = {}
    for entry in sorted(folder.iterdir()):
        told = entry.stat()
        found[entry.name] = (told.st_size, told.st_mtime_ns)
    return found


async def encode_folder(folder: Path, files: FileStats) -> AsyncGenerator[bytes, None]:
    """The body of /upload."""
    head = msgspec.json.encode(_Head([(name, size) for name, (size, _) in files.items()]))
    yield len(head).to_bytes(LENGTH_BYTES, "little") + head
    digest = hashlib.sha256()
    for name in files:
        with (folder / name).open("rb") as file:
            while piece := await asyncio.to_thread(file.read, PIECE):
                digest.update(piece)
                yield piece
    yield digest.digest()


class UploadStore:
    """What was sent to this process. It is gone with it."""

    def __init__(self) -> None:
        self._root: str | None = None
        self._taken: list[Path] = []
        self.loaded_path = ""
        """The folder that was loaded last: it is kept, and read again when its server is started again."""

    async def check_folder(self, request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=FolderCheck)
        except msgspec.DecodeError as error:
            raise EngineError(f"the body cannot be read: {error}") from error
        try:
            seen = await asyncio.to_thread(read_file_stats, Path(asked.path)) == asked.files
        except OSError:
            seen = False
        return _json(FolderCheckResult(seen))

    async def receive_folder(self, request: Request) -> Response:
        if self._root is None:
            self._root = tempfile.mkdtemp(prefix="instar-policies-")
            weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix=".coming-", dir=self._root))
        try:
            await _receive(_Body(request.stream()), fresh)
            whole = fresh.with_name(fresh.name.removeprefix(".coming-"))
            await asyncio.to_thread(fresh.rename, whole)
        except ClientDisconnect as error:
            raise EngineUnavailable("the sender went away") from error
        except OSError as error:
            raise EngineError(f"the policy's files cannot be written: {error}") from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        self._taken.append(whole)
        while len(self._taken) > MAX_UPLOADS:
            oldest = next(folder for folder in self._taken if str(folder) != self.loaded_path)
            self._taken.remove(oldest)
            await asyncio.to_thread(shutil.rmtree, oldest, ignore_errors=True)
        return _json(UploadResult(str(whole)))


async def _receive(body: _Body, folder: Path) -> None:
    """Raises EngineError where it is not whole."""
    length = int.from_bytes(await body.exactly(LENGTH_BYTES), "little")
    if length > LARGEST_HEAD:
        raise EngineError("the upload does not begin with the names of its files")
    try:
        head = msgspec.json.decode(await body.exactly(length), type=_Head)
    except msgspec.DecodeError as error:
        raise EngineError(f"the upload cannot be read: {error}") from error
    digest = hashlib.sha256()
    for name, size in head.files:
        if name != Path(name).name or name in ("", ".."):
            raise EngineError(f"a file of an upload cannot be called {name!r}")
        with (folder / name).open("xb") as file:
            async for piece in body.pieces(size):
                digest.update(piece)
                await asyncio.to_thread(file.write, piece)
    if await body.exactly(digest.digest_size) != digest.digest():
        raise EngineError("the upload did not arrive as it was sent: its hash is another one")


class _Body:
    """A request's body, read as far as is asked for."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self._rest = b""

    async def exactly(self, size: int) -> bytes:
        return b"".join([piece async for piece in self.pieces(size)])

    async def pieces(self, size: int) -> AsyncGenerator[bytes, None]:
        while size:
            if not self._rest:
                self._rest = await anext(self._stream, b"")
                if not self._rest:
                    raise EngineError("the upload is not whole")
            piece, self._rest = self._rest[:size], self._rest[size:]
            size -= len(piece)
            yield piece


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
