"""Parts of `bench/rewards.py`, each a process of its own."""
