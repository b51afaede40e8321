"""A module whose import does not return for an hour, so that an engine that needs it does not start."""

import time

time.sleep(3600.0)
