"""Weaver's wire protocol as sent by its SDK 1.19."""
