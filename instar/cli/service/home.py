"""The service's folders and files, its port and its API keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from instar.cluster.supervisor import open_listener
from instar.errors import InstarError
from instar.gateway.auth import new_key
from instar.http.auth import hash_key
from instar.store.base import KeyKind, KeyRow, Store

DEFAULT_PORT = 4678
XDG_DEFAULTS = {
    "XDG_CONFIG_HOME": ".config",
    "XDG_DATA_HOME": ".local/share",
    "XDG_STATE_HOME": ".local/state",
}
"""The variables of the XDG base directory specification, with their defaults in the user's home."""
KEY_HASH_DIGITS = 8


@dataclass(frozen=True)
class Home:
    """The folders of the service. All of them are the same folder if the user chose one with `--home`."""

    config: Path
    data: Path
    state: Path
    folder: Path | None = None
    """The folder that the user chose."""

    @classmethod
    def locate(cls, folder: Path | None, env: Mapping[str, str]) -> Home:
        if folder is not None:
            folder = folder.expanduser().resolve()
            return cls(folder, folder, folder, folder)
        return cls(*(find_xdg_folder(name, env) / "instar" for name in XDG_DEFAULTS))

    @property
    def config_file(self) -> Path:
        return self.config / "config.yaml"

    @property
    def env_file(self) -> Path:
        """Environment variables that the systemd unit sets, such as the API keys of providers."""
        return self.config / "service.env"

    @property
    def settings_file(self) -> Path:
        """The port and the keys."""
        return self.data / "service.json"

    @property
    def runs(self) -> Path:
        return self.data / "runs"

    @property
    def lock_file(self) -> Path:
        return self.state / "service.lock"

    @property
    def state_file(self) -> Path:
        return self.state / "state.json"

    @property
    def log_file(self) -> Path:
        return self.state / "service.log"

    def create(self) -> None:
        """Create the folders for data and state, readable only by their owner."""
        for folder in (self.data, self.state):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise InstarError(
                    f"cannot create {folder}: {error.strerror}; choose another folder with --home"
                ) from error


def find_xdg_folder(name: str, env: Mapping[str, str]) -> Path:
    """Return a folder of the XDG base directory specification, which ignores relative paths."""
    path = Path(env.get(name) or "")
    return path if path.is_absolute() else Path.home() / XDG_DEFAULTS[name]


class ServiceSettings(msgspec.Struct):
    """The port and the keys, which the service chooses at its first start and keeps."""

    port: int | None = None
    keys: dict[str, str] = {}
    """The keys by label, see `make_key_label`."""

    @classmethod
    def read(cls, home: Home) -> ServiceSettings:
        try:
            return msgspec.json.decode(home.settings_file.read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()
        except (OSError, msgspec.DecodeError) as error:
            raise InstarError(
                f"cannot read the port and the keys from {home.settings_file}: {error}; repair the file, or "
                "delete it to have a new port and new keys"
            ) from error

    def write(self, home: Home) -> None:
        scratch = home.settings_file.with_suffix(".partial")
        scratch.unlink(missing_ok=True)
        scratch.touch(mode=0o600)
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2))
        scratch.replace(home.settings_file)

    def get_key(self, kind: KeyKind, agent_id: str | None) -> str:
        return self.keys[make_key_label(kind, agent_id)]


def make_key_label(kind: KeyKind, agent_id: str | None) -> str:
    return f"service-{kind}" if agent_id is None else f"service-{kind}-{agent_id}"


def choose_port(home: Home, host: str) -> int:
    """Return the stored port. At the first start, choose the default port or, if it is taken, a free one."""
    settings = ServiceSettings.read(home)
    if settings.port is None:
        try:
            listener = open_listener(host, DEFAULT_PORT)
        except InstarError:
            listener = open_listener(host, 0)
        with listener:
            settings.port = listener.getsockname()[1]
        settings.write(home)
    assert settings.port is not None
    return settings.port


async def ensure_keys(home: Home, store: Store, agent_id: str) -> ServiceSettings:
    """Return the settings with a valid key of each kind for the agent. Keys that are missing or revoked are
    created, and all keys are added to the store, which is a new one if the run's name has changed."""
    settings = ServiceSettings.read(home)
    owners: dict[KeyKind, str | None] = {"agent": agent_id, "feedback": agent_id, "admin": None}
    for kind, owner in owners.items():
        label = make_key_label(kind, owner)
        key = settings.keys.get(label)
        row = await store.key(hash_key(key)) if key is not None else None
        if key is None or (row is not None and row.revoked_at is not None):
            key, row = new_key(), None
            settings.keys[label] = key
            settings.write(home)  # before the store, so that every stored key is known
        if row is None:
            key_hash = hash_key(key)
            await store.put_key(KeyRow(key_hash, kind, owner, f"{label}-{key_hash[:KEY_HASH_DIGITS]}"))
    return settings
