"""Logging for the processes that Instar starts: one logger per module, one format."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: int = logging.INFO) -> None:
    """Send the records of all ``instar`` loggers to standard error. Other loggers are not changed."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("instar")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
