"""A systemd unit that runs the service for one user."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from instar.cli.service.background import STOP_TIMEOUT_SECONDS, make_command
from instar.cli.service.home import XDG_DEFAULTS, Home, find_xdg_folder
from instar.cli.service.lock import Launch
from instar.cluster.base import KILL_TIMEOUT_SECONDS
from instar.cluster.interrupts import EXIT_INTERRUPTED

UNIT_NAME = "instar.service"


def make_unit(home: Home, launch: Launch, env: Mapping[str, str]) -> str:
    # A service manager does not have the variables of the user's shell.
    variables = [f"{name}={env[name]}" for name in XDG_DEFAULTS if home.folder is None and env.get(name)]
    lines = [
        "[Unit]",
        "Description=Instar gateway",
        "",
        "[Service]",
        f"ExecStart={' '.join(map(quote, make_command(home, launch)))}",
        f"WorkingDirectory={launch.cwd.replace('%', '%%')}",
        *(f"Environment={quote(variable)}" for variable in variables),
        f"EnvironmentFile=-{str(home.env_file).replace('%', '%%')}",
        "Restart=on-failure",
        "RestartSec=5",
        f"SuccessExitStatus={EXIT_INTERRUPTED}",
        # Only the service gets the signal; it stops its processes in order.
        "KillMode=mixed",
        f"TimeoutStopSec={STOP_TIMEOUT_SECONDS + KILL_TIMEOUT_SECONDS:g}",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def find_unit_file(env: Mapping[str, str]) -> Path:
    return find_xdg_folder("XDG_CONFIG_HOME", env) / "systemd" / "user" / UNIT_NAME


def describe_enabling() -> str:
    return (
        "Enable it with:\n\n"
        "  systemctl --user daemon-reload\n"
        f"  systemctl --user enable --now {UNIT_NAME}\n"
        f"  loginctl enable-linger {os.environ.get('USER', '$USER')}     # keeps it running after logout\n\n"
        f"Its log: journalctl --user -u {UNIT_NAME}"
    )


def quote(argument: str) -> str:
    """Quote an argument for systemd, which expands specifiers (`%`) and variables (`$`)."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != argument or " " in argument or "'" in argument else argument
