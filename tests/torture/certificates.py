"""A certificate file with a single certificate, to start test processes faster.

SDK clients load all installed certificates several times per process, which takes longer than the rest of a
test.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import certifi

END = "-----END CERTIFICATE-----\n"


@cache
def single_certificate_env() -> dict[str, str]:
    """Return the environment variable for a file with one certificate, which suffices for localhost."""
    file = Path(tempfile.mkdtemp()) / "one.pem"
    first, end, _ = certifi.contents().partition(END)
    file.write_text(first + end)
    return {"SSL_CERT_FILE": str(file)}
