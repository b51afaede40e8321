"""The tasks and the agent of `instar demo`: arithmetic problems that are solved with a calculator tool."""
