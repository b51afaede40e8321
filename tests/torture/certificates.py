"""An SDK's clients read all certificates there are, several times in every life of a process, which takes
them longer than anything else that they do in a test."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import certifi

END = "-----END CERTIFICATE-----\n"


@cache
def single_certificate_env() -> dict[str, str]:
    """The variable that names a file with one of them, for processes that talk to this machine alone."""
    file = Path(tempfile.mkdtemp()) / "one.pem"
    first, end, _ = certifi.contents().partition(END)
    file.write_text(first + end)
    return {"SSL_CERT_FILE": str(file)}
