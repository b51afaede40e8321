"""The tiny model that most tests use."""

from __future__ import annotations

from instar.conformance.tiny import CHATML, make_tiny_model, make_tiny_tokenizer

__all__ = ["CHATML", "make_tiny_model", "make_tiny_tokenizer"]
