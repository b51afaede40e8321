"""Engines that sample from the training service."""
