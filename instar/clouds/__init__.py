"""Training services: how each SDK is reached. Backends train through these, engines sample through them."""
