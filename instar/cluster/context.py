"""The context of a role process: its config, URL, listening socket, store and stop events."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from collections.abc import Callable

from instar.cluster.layout import RunFolder
from instar.cluster.supervisor import HOST_ENV, LEASE_ENV, ROLE_URL_ENV, log_location
from instar.cluster.versions import find_policy
from instar.config import PostgresStoreConfig, RunConfig
from instar.store.base import Store
from instar.types import Endpoint, Policy

ADMIN_KEY_ENV = "INSTAR_ADMIN_KEY"
ENGINE_TOKEN_ENV = "INSTAR_ENGINE_TOKEN"
VERSION_ENV = "INSTAR_SERVED_VERSION"
"""The environment variable with the policy and version to serve, as ``POLICY@VERSION``. It is empty if the
engines serve the newest version."""
HEARTBEAT_INTERVAL_SECONDS = 0.5
ROLLOUT_FINISHED = "finished"
"""The activity that the rollout announces when it exits because all steps are trained."""


class RoleContext:
    def __init__(self, role: str, folder: RunFolder, arguments: argparse.Namespace) -> None:
        self.role = role
        self.name: str = arguments.name or role
        self.folder = folder
        self.config: RunConfig = folder.read_config()
        self.run_id = self.policy_id = self.config.name
        self.arguments = arguments
        self.url = os.environ.get(ROLE_URL_ENV, "")
        """The URL at which other roles reach this role, or an empty string if the role does not listen."""
        self.stop = asyncio.Event()
        """Set when the role should exit soon."""
        self.is_started = False
        """True once the role has started and checks ``stop``. If told to exit earlier, it is cancelled."""
        self.drain = asyncio.Event()
        """Set when the role should finish its current work, accept no new work, and exit."""

    def open_inherited_listener(self) -> socket.socket:
        return socket.socket(fileno=self.arguments.fd)

    async def open_store(self) -> Store:
        """Open the store for writing under this role's lease. Remove the store's password from the
        environment, so that agents do not inherit it."""
        from instar.store.factory import open_store

        store, section = open_store(self.config), self.config.store
        if isinstance(section, PostgresStoreConfig) and (name := section.password_env_name(os.environ)):
            del os.environ[name]
        await store.hold_lease(self.run_id, self.name, self.lease)
        return store

    @property
    def lease(self) -> int:
        """The lease under which this role writes to the store."""
        return int(os.environ[LEASE_ENV])

    async def fetch_policy(self, store: Store) -> Policy:
        """Return the policy that the engines serve, unless the trainer sends them another one."""
        if reference := os.environ.get(VERSION_ENV):
            policy_id, _, version = reference.rpartition("@")
            return await find_policy(store, policy_id, int(version))
        return await store.latest_policy(self.policy_id)

    async def heartbeat(self, store: Store, get_activity: Callable[[], str]) -> None:
        """Announce the role's activity repeatedly until cancelled."""
        while True:
            await self.announce(store, get_activity())
            await asyncio.sleep(HEARTBEAT_INTERVAL_SECONDS)

    async def announce(self, store: Store, activity: str) -> None:
        log = log_location(os.environ.get(HOST_ENV, ""), self.folder.log(self.name))
        await store.put_endpoint(
            Endpoint(self.run_id, self.role, self.name, self.url, os.getpid(), activity, log, time.time())
        )
