"""Checkpoints as Weaver names and shows them."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

from instar.protocol.base import CheckpointInfo, ProtocolError

SCHEME = "weaver://"
FOLDERS = {"state": "checkpoints", "sampler": "samplers"}
OURS = {"checkpoints": "weights", "samplers": "sampler_weights"}
"""Folders in Weaver's paths, and the workshop's for the same."""


def weaver_path(info: CheckpointInfo) -> str:
    """`weaver://<model>/checkpoints/<name>`, or `samplers` for what can only be sampled from."""
    return f"{SCHEME}{info.model_id}/{FOLDERS[info.kind]}/{_name(info)}"


def to_service_path(path: str) -> str:
    """The workshop's name for a path that a client gives. It takes any scheme."""
    parts = path.removeprefix(SCHEME).split("/", 2)
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in OURS:
        raise ProtocolError(
            f"{path!r} names no checkpoint: expected {SCHEME}<model>/checkpoints/<name> or "
            f"{SCHEME}<model>/samplers/<name>"
        )
    model_id, folder, name = parts
    return f"{SCHEME}{model_id}/{OURS[folder]}/{name}"


def checkpoint_fields(info: CheckpointInfo) -> dict[str, Any]:
    """As the SDK's `Checkpoint` reads it."""
    path = weaver_path(info)
    left = None if info.expires_at is None else round(info.expires_at - info.created_at)
    weights = "weight_and_optimizer" if info.has_optimizer else "weight"
    return {
        # The SDK puts ids into URLs and takes UUIDs alone; this one is the same for the same path.
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, path)),
        "path": path,
        "name": _name(info),
        "checkpoint_type": "sampling" if info.kind == "sampler" else weights,
        "status": "completed",
        "model_id": info.model_id,
        "base_model": info.base_model,
        "size_bytes": info.size_bytes,
        **{part: info.extra.get(part) for part in ("train_attn", "train_mlp", "train_unembed")},
        "ttl_seconds": left,
        "created_at": _time(info.created_at),
        "expires_at": None if info.expires_at is None else _time(info.expires_at),
    }


def _name(info: CheckpointInfo) -> str:
    return info.path.rpartition("/")[2]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
