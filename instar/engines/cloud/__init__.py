"""Engines that sample at the service that trains."""
