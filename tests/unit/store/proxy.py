"""A network between a store and its server that fails when it is told to."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from enum import Enum, auto
from typing import Self


class Cut(Enum):
    """What happens to the next commit."""

    BEFORE = auto()
    """It does not reach the server, whose end of the connection is closed."""
    BEFORE_AND_OPEN = auto()
    """It does not reach the server, which is not told that the client is gone."""
    AFTER = auto()
    """It reaches the server; the answer is lost."""
    SILENCE = auto()
    """Nothing is said any more, in either direction, and nothing closed."""


class Proxy:
    """On a loopback port, before a TCP port of the same machine."""

    def __init__(self, port: int) -> None:
        self.cut: Cut | None = None
        self.cuts = 0
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._open += [client, server]
                threading.Thread(target=self._carry, args=(client, server), daemon=True).start()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile, when the test ends
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(65536)
                    if not data:
                        client.close()
                        server.close()
                        return
                    if source is client and self.cut is not None and b"COMMIT\0" in data:
                        return self._fail(client, server, data)
                    (server if source is client else client).sendall(data)

    def _fail(self, client: socket.socket, server: socket.socket, data: bytes) -> None:
        cut, self.cut = self.cut, None
        self.cuts += 1
        match cut:
            case Cut.BEFORE:
                server.close()
                client.close()
            case Cut.BEFORE_AND_OPEN:
                client.close()
            case Cut.AFTER:
                server.sendall(data)
                server.recv(65536)
                client.close()
            case _:
                pass
