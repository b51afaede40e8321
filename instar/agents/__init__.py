"""Agents for the task sets that are known by name, each as a stranger would write it: an SDK and a loop."""
