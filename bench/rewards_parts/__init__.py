"""Programs that `bench/rewards.py` runs in their own processes."""
