"""Who calls: an API key of this server, or a token that it gave for one.

Clients whose keys are not of Tinker's own form (MinT's `sk-`) exchange them for a token, and send that. It is
signed with the key it stands for, so that it holds across restarts and nothing has to be kept.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Iterable, Mapping

import orjson

from instar.protocol.base import ProtocolError
from instar.types import Json

KEY_HEADER = "x-api-key"
KEY_PREFIX = "tml-"
"""What Tinker's own clients ask of a key."""
TOKEN_SECONDS = 3600.0
_TOKEN_PREFIX = "eyJ"
"""How every JWT begins."""


class TinkerKeyStore:
    """The keys that are let in. What a key makes belongs to its hash, its ``owner``."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._secrets = {_hash(key): key.encode("utf-8", "surrogatepass") for key in keys}

    def authenticate(self, headers: Mapping[str, str]) -> str:
        """Raises ProtocolError 401 for a key or token that is not known."""
        given = headers.get(KEY_HEADER, "").strip()
        if not given:
            raise ProtocolError("no API key: send it as X-API-Key", 401)
        owner = self._owner_of_key(given)
        if owner is None and given.startswith(_TOKEN_PREFIX):
            owner = self._owner_of_token(given)
        if owner is None:
            raise ProtocolError("this API key is not one of this server's", 401)
        return owner

    def issue_token(self, owner: str) -> str:
        """A JWT that stands for the owner's key for a while."""
        claims = {
            "iss": "instar",
            "sub": f"tml:user:{owner[:16]}",
            "org_id": "instar",
            "owner": owner,
            "exp": time.time() + TOKEN_SECONDS,
        }
        signed = f"{_encoded({'alg': 'HS256', 'typ': 'JWT'})}.{_encoded(claims)}"
        return f"{signed}.{self._signature(owner, signed)}"

    def _owner_of_key(self, given: str) -> str | None:
        hashed = _hash(given)
        # Every key is compared, so that the time taken tells nothing.
        same = [owner for owner in self._secrets if hmac.compare_digest(owner, hashed)]
        return same[0] if same else None

    def _owner_of_token(self, given: str) -> str | None:
        signed, _, signature = given.rpartition(".")
        claims = _decoded(signed.partition(".")[2])
        owner, expires = claims.get("owner"), claims.get("exp")
        if not isinstance(owner, str) or owner not in self._secrets or not isinstance(expires, float):
            return None
        if not hmac.compare_digest(self._signature(owner, signed).encode(), signature.encode()):
            return None
        return owner if time.time() < expires else None

    def _signature(self, owner: str, signed: str) -> str:
        digest = hmac.new(
            self._secrets[owner], signed.encode("utf-8", "surrogatepass"), hashlib.sha256
        ).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def has_tinker_key(headers: Mapping[str, str]) -> bool:
    """Whether the key is of the form that Tinker's clients send as it is."""
    return headers.get(KEY_HEADER, "").startswith((KEY_PREFIX, _TOKEN_PREFIX))


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _encoded(value: Json) -> str:
    return base64.urlsafe_b64encode(orjson.dumps(value)).decode().rstrip("=")


def _decoded(text: str) -> Json:
    """Empty for what is no token."""
    try:
        value = orjson.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
