"""Wrappers around the SDKs of training services, for backends and engines."""
