"""A TCP proxy between a store and its server that makes commits fail on demand."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from enum import Enum, auto
from typing import Self


class CommitFailure(Enum):
    """How the next commit fails."""

    LOST = auto()
    """The commit does not reach the server, and both connections are closed."""
    LOST_WITH_SERVER_OPEN = auto()
    """The commit does not reach the server. Only the client's connection is closed."""
    RESPONSE_LOST = auto()
    """The commit reaches the server, but its response is lost and the client's connection is closed."""
    UNRESPONSIVE = auto()
    """Neither the commit nor anything after it is forwarded, but both connections stay open."""


class Proxy:
    """Forwards connections to a local port. If ``next_failure`` is set, the next commit fails that way."""

    def __init__(self, port: int) -> None:
        self.next_failure: CommitFailure | None = None
        self.failure_count = 0
        self._target_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
                self._sockets += [client, server]
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):  # the sockets are closed when the test ends
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(65536)
                    if not data:
                        client.close()
                        server.close()
                        return
                    if source is client and self.next_failure is not None and b"COMMIT\0" in data:
                        return self._fail(client, server, data)
                    (server if source is client else client).sendall(data)

    def _fail(self, client: socket.socket, server: socket.socket, data: bytes) -> None:
        failure, self.next_failure = self.next_failure, None
        self.failure_count += 1
        match failure:
            case CommitFailure.LOST:
                server.close()
                client.close()
            case CommitFailure.LOST_WITH_SERVER_OPEN:
                client.close()
            case CommitFailure.RESPONSE_LOST:
                server.sendall(data)
                server.recv(65536)
                client.close()
            case _:
                pass
