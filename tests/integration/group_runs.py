"""`instar train` processes that train on groups from outside."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from tests.torture.run_process import RunProcess

ADMIN_KEY = "sk-instar-test-admin-of-groups"
GROUP_SIZE = 4


def make_group_config(folder: Path, model: Path, *, steps: int, **trainer: Any) -> dict[str, Any]:
    """Return the config of a run without a rollout, with the local engine and backend."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # a resumed run must listen on the same port
    return {
        "name": "groups",
        "dir": str(folder / "run"),
        "model": {"name": str(model), "dtype": "fp32", "device": "cpu", "max_context": 128},
        "gateway": {"port": port},
        "engine": {"type": "local", "threads": 1},
        "backend": {"type": "local", "threads": 1, "lora": {"rank": 8, "alpha": 16}},
        "trainer": {
            "mode": "sync",
            "steps": steps,
            "groups_per_step": 2,
            "adam": {"lr": 2e-3},
            "max_kl": None,  # a random model must change more than a trained one
            "warmup_steps": 0,
            "tensorboard": False,
            **trainer,
        },
    }


class GroupRun(RunProcess):
    """A run whose sessions are not recorded in a ledger, because another process runs its agents."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config['gateway']['port']}"

    def start_serving(self, *, resume: bool = False) -> None:
        """Start the run and wait until its roles are ready. It has no rollout."""
        self.roles = ("engine", "gateway", "trainer")
        self.start(resume=resume, INSTAR_ADMIN_KEY=ADMIN_KEY)
        assert self.wait_until(self.is_ready), self.collect_logs()

    def assert_replies_recorded(self) -> None:
        calls = self.query("SELECT COUNT(*) FROM calls WHERE status = 'ok'")
        assert calls[0][0] > 0
