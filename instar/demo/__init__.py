"""What `instar demo` trains: a calculator task and an agent that solves it with a tool."""
