"""The kill points of a trainer that uses a training service."""

from __future__ import annotations

from tests.torture.kill_switch import STORE, KillPoint

BACKEND_CLASSES = {
    "tinker": "instar.backends.tinker:TinkerBackend",
    "mint": "instar.backends.tinker:MintBackend",
    "weaver": "instar.backends.weaver:WeaverBackend",
}
REQUEST_SENT_POINTS = {
    "tinker": KillPoint("instar.clouds.tinker_training:TinkerTrainingSession.send"),
    "mint": KillPoint("instar.clouds.tinker_training:TinkerTrainingSession.send"),
    "weaver": KillPoint("instar.clouds.weaver:WeaverCaller.await_operation", fires_before_call=True),
}
"""Reached when a request has been sent and its response has not arrived yet."""
STEP_POINT_NAMES = (
    "claimed",
    "submitted",
    "sent",
    "forward_backward",
    "optim_step",
    "saved on service",
    "state written",
    "checkpoint renamed",
    "saved",
    "version reserved",
    "artifact written",
    "published",
    "pushed",
    "committed",
)
RECOVERY_POINT_NAMES = ("started", "state loaded", "tombstoned", "released")


def make_kill_points(backend: str) -> dict[str, KillPoint]:
    backend_class = BACKEND_CLASSES[backend]
    points = {
        "claimed": KillPoint(f"{STORE}.claim_step", 2),
        "submitted": KillPoint(f"{STORE}.advance_step", 2, (3, "submitted")),
        "sent": REQUEST_SENT_POINTS[backend],
        "forward_backward": KillPoint(f"{backend_class}.forward_backward"),
        "optim_step": KillPoint(f"{backend_class}.optim_step"),
        "saved on service": KillPoint("instar.backends.cloud:write_folder", fires_before_call=True),
        "state written": KillPoint(f"{backend_class}.save_state"),
        "checkpoint renamed": KillPoint("instar.trainer.loop:save_checkpoint"),
        "saved": KillPoint(f"{STORE}.advance_step", 2, (3, "saved")),
        "version reserved": KillPoint(f"{STORE}.reserve_version", 3),
        "artifact written": KillPoint(f"{backend_class}.publish"),
        "published": KillPoint(f"{STORE}.publish"),
        "pushed": KillPoint("instar.sync.files:FileSync.push"),
        "committed": KillPoint(f"{STORE}.advance_step", 2, (3, "committed")),
        "started": KillPoint(f"{backend_class}.start"),
        "state loaded": KillPoint(f"{backend_class}.load_state"),
        "tombstoned": KillPoint(f"{STORE}.tombstone"),
        "released": KillPoint(f"{STORE}.release_steps"),
    }
    assert points.keys() == {*STEP_POINT_NAMES, *RECOVERY_POINT_NAMES}
    return points
