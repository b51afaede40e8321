"""A certificate file with a single certificate, to start test processes faster.

SDK clients load all installed certificates several times per process, which takes longer than the rest of a
test.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import certifi

END_MARKER = "-----END CERTIFICATE-----\n"


@cache
def make_single_certificate_env() -> dict[str, str]:
    """Write a file with one certificate, enough for localhost, and return its environment variable."""
    path = Path(tempfile.mkdtemp()) / "one.pem"
    first, end, _ = certifi.contents().partition(END_MARKER)
    path.write_text(first + end)
    return {"SSL_CERT_FILE": str(path)}
