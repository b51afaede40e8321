"""`instar backends check NAME` checks that a backend computes what `instar.backends.base` specifies.

The same cases run on the local backend in this process and on the one under test, which may need a different
interpreter and a service. Then the numbers are compared.
"""
