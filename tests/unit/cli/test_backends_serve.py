from __future__ import annotations

import pytest

from instar.cli.backends_serve import KEYS_ENV, read_configured_keys
from instar.errors import ConfigError

VALID_KEY = "tml-0123456789abcdef"


def test_configured_keys_are_read_from_the_environment() -> None:
    assert read_configured_keys({}, "tinker", "127.0.0.1") == []
    assert read_configured_keys({KEYS_ENV: f"{VALID_KEY}, sk-{VALID_KEY},"}, "tinker", "127.0.0.1") == [
        VALID_KEY,
        f"sk-{VALID_KEY}",
    ]
    assert read_configured_keys({KEYS_ENV: "any-other-key-format"}, "weaver", "localhost") == [
        "any-other-key-format"
    ]


@pytest.mark.parametrize(
    ("keys", "host", "message"),
    [
        ("tml-short", "127.0.0.1", "key 1 must have at least .* got 9"),
        (VALID_KEY, "0.0.0.0", r"key 1 must have at least .* for a server on 0\.0\.0\.0, got 20"),
        (f"{VALID_KEY},other-0123456789ab", "::1", "key 2 must start with tml- or sk-"),
        ("tml-0123456789 abcdef", "127.0.0.1", "key 1 has characters that an HTTP header cannot contain"),
    ],
)
def test_invalid_key_is_rejected_without_being_quoted(keys: str, host: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read_configured_keys({KEYS_ENV: keys}, "tinker", host)
    assert "0123456789" not in str(raised.value)
