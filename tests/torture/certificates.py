"""A short certificate file: an SDK's clients load all installed certificates several times per process, which
takes longer than anything else they do in a test."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import certifi

END = "-----END CERTIFICATE-----\n"


@cache
def single_certificate_env() -> dict[str, str]:
    """Return the variable that names a file with one certificate, for processes that only use localhost."""
    file = Path(tempfile.mkdtemp()) / "one.pem"
    first, end, _ = certifi.contents().partition(END)
    file.write_text(first + end)
    return {"SSL_CERT_FILE": str(file)}
