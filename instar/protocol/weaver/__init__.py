"""Weaver's wire protocol, as used by version 1.19 of its SDK."""
