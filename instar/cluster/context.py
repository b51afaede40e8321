"""What every role has at hand: its part of the run, its store, its voice."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable

from instar.cluster.layout import RunFolder
from instar.cluster.supervisor import HOST_ENV, LEASE_ENV, ROLE_URL_ENV, log_location
from instar.config import PostgresStoreConfig, RunConfig
from instar.store.base import Store
from instar.types import Endpoint

ADMIN_KEY_ENV = "INSTAR_ADMIN_KEY"
ENGINE_TOKEN_ENV = "INSTAR_ENGINE_TOKEN"
HEARTBEAT_SECONDS = 0.5


class RoleContext:
    """What every role has at hand."""

    def __init__(self, role: str, folder: RunFolder, arguments: argparse.Namespace) -> None:
        self.role = role
        self.name: str = arguments.name or role
        self.folder = folder
        self.config: RunConfig = folder.read_config()
        self.arguments = arguments
        self.url = os.environ.get(ROLE_URL_ENV, "")
        """Where others reach it, if it listens."""
        self.stop = asyncio.Event()
        """To end soon."""
        self.drain = asyncio.Event()
        """To begin nothing more, and to end with what is under way."""

    @property
    def run_id(self) -> str:
        return self.config.name

    @property
    def policy_id(self) -> str:
        return self.config.name

    def socket(self) -> socket.socket:
        return socket.socket(fileno=self.arguments.fd)

    def log(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    async def open_store(self) -> Store:
        """To write under this role's lease. It has read its password, which no agent is to inherit."""
        from instar.store.factory import open_store

        store, section = open_store(self.config), self.config.store
        if isinstance(section, PostgresStoreConfig) and (name := section.password_env_name(os.environ)):
            del os.environ[name]
        await store.hold_lease(self.run_id, self.name, int(os.environ[LEASE_ENV]))
        return store

    async def heartbeat(self, store: Store, doing: Callable[[], str]) -> None:
        """Say what this role does, twice a second, until cancelled."""
        while True:
            await self.announce(store, doing())
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def announce(self, store: Store, doing: str) -> None:
        await store.put_endpoint(
            Endpoint(
                self.run_id,
                self.role,
                self.name,
                self.url,
                os.getpid(),
                doing,
                log_location(os.environ.get(HOST_ENV, ""), self.folder.log(self.name)),
                time.time(),
            )
        )


async def run_until_first(*parts: Awaitable[object]) -> None:
    """Until the first part ends; its error is raised, the others are cancelled."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_any(*events: asyncio.Event) -> None:
    await run_until_first(*(event.wait() for event in events))


async def call_when_set(action: Callable[[], None], *events: asyncio.Event) -> None:
    await wait_any(*events)
    action()


async def wait_forever() -> None:
    await asyncio.Event().wait()
