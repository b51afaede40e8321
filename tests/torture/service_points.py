"""The moments of a step at a training service that a trainer can die at."""

from __future__ import annotations

from tests.torture.killer import STORE, Point

BACKENDS = {
    "tinker": "instar.backends.tinker:TinkerBackend",
    "mint": "instar.backends.tinker:MintBackend",
    "weaver": "instar.backends.weaver:WeaverBackend",
}
SENT = {
    "tinker": Point("instar.clouds.tinker_training:TinkerTrainingSession.send"),
    "mint": Point("instar.clouds.tinker_training:TinkerTrainingSession.send"),
    "weaver": Point("instar.clouds.weaver:WeaverCallPolicy.await_operation", before=True),
}
"""A call is on its way, and its answer is not there."""
IN_STEP = (
    "claimed",
    "submitted",
    "sent",
    "forward_backward",
    "optim_step",
    "saved there",
    "state written",
    "checkpoint renamed",
    "saved",
    "version reserved",
    "artifact made",
    "published",
    "pushed",
    "committed",
)
IN_RECOVERY = ("started", "state loaded", "tombstoned", "released")


def points(backend: str) -> dict[str, Point]:
    made = BACKENDS[backend]
    found = {
        "claimed": Point(f"{STORE}.claim_step", 2),
        "submitted": Point(f"{STORE}.advance_step", 2, (3, "submitted")),
        "sent": SENT[backend],
        "forward_backward": Point(f"{made}.forward_backward"),
        "optim_step": Point(f"{made}.optim_step"),
        "saved there": Point(f"{made.partition(':')[0]}:write_folder", before=True),
        "state written": Point(f"{made}.save_state"),
        "checkpoint renamed": Point("instar.trainer.loop:save_checkpoint"),
        "saved": Point(f"{STORE}.advance_step", 2, (3, "saved")),
        "version reserved": Point(f"{STORE}.reserve_version", 3),
        "artifact made": Point(f"{made}.publish"),
        "published": Point(f"{STORE}.publish"),
        "pushed": Point("instar.sync.files:FileSync.push"),
        "committed": Point(f"{STORE}.advance_step", 2, (3, "committed")),
        "started": Point(f"{made}.start"),
        "state loaded": Point(f"{made}.load_state"),
        "tombstoned": Point(f"{STORE}.tombstone"),
        "released": Point(f"{STORE}.release_steps"),
    }
    assert found.keys() == {*IN_STEP, *IN_RECOVERY}
    return found
