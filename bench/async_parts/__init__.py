"""Parts of bench/async.py."""
