"""Does a backend compute what `instar.backends.base` says? `instar backends check NAME` finds out.

The same scenes are played on the local backend in this process and on the one under test, which may live
in another interpreter and behind a service; then the numbers are compared.
"""
