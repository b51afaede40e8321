"""Converts checkpoint paths and fields between `CheckpointStore` and Weaver's protocol."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

from instar.protocol.base import TRAINED_PARTS, CheckpointInfo, ProtocolError

SCHEME = "weaver://"
FOLDERS = {"state": "checkpoints", "sampler": "samplers"}
SERVICE_FOLDERS = {"checkpoints": "weights", "samplers": "sampler_weights"}
"""Maps the folder names in Weaver's paths to those that `CheckpointStore` uses."""


def to_weaver_path(info: CheckpointInfo) -> str:
    """Return `weaver://<model>/checkpoints/<name>`, or `weaver://<model>/samplers/<name>` for a sampler."""
    return f"{SCHEME}{info.model_id}/{FOLDERS[info.kind]}/{_checkpoint_name(info)}"


def to_service_path(path: str) -> str:
    """Convert a client's path to a path that `CheckpointStore.find` accepts."""
    parts = path.removeprefix(SCHEME).split("/", 2)
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in SERVICE_FOLDERS:
        raise ProtocolError(
            f"invalid checkpoint path {path!r}; expected {SCHEME}<model>/checkpoints/<name> or "
            f"{SCHEME}<model>/samplers/<name>"
        )
    model_id, folder, name = parts
    return f"{SCHEME}{model_id}/{SERVICE_FOLDERS[folder]}/{name}"


def checkpoint_fields(info: CheckpointInfo) -> dict[str, Any]:
    path = to_weaver_path(info)
    ttl = None if info.expires_at is None else round(info.expires_at - info.created_at)
    state_type = "weight_and_optimizer" if info.has_optimizer else "weight"
    return {
        # The SDK accepts only UUIDs as ids.
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, path)),
        "path": path,
        "name": _checkpoint_name(info),
        "checkpoint_type": "sampling" if info.kind == "sampler" else state_type,
        "status": "completed",
        "model_id": info.model_id,
        "base_model": info.base_model,
        "size_bytes": info.size_bytes,
        **{part: info.extra.get(part) for part in TRAINED_PARTS},
        "ttl_seconds": ttl,
        "created_at": _format_time(info.created_at),
        "expires_at": None if info.expires_at is None else _format_time(info.expires_at),
    }


def _checkpoint_name(info: CheckpointInfo) -> str:
    return info.path.rpartition("/")[2]


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
