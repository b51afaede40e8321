"""Runs what a model wrote, so that it can harm nothing."""
