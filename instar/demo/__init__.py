"""The tasks and the agent of `instar demo`: arithmetic that is solved with a calculator tool."""
