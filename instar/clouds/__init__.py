"""The SDKs of training services, which backends train through and engines sample from."""
