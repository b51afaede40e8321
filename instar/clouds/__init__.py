"""Clients for the SDKs of training services. Backends train and engines sample through them."""
