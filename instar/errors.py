"""Errors, named by the boundary that the failure crossed.

InstarError
├── ConfigError        a setting that cannot be honoured; names its path and what is allowed
├── StoreError         the database refused
│   ├── StoreNewer         written by a newer Instar
│   ├── StoreCorrupt       the file is damaged
│   ├── StoreFull          no room left on the disk
│   ├── LeaseLost          another process has taken over what this one did for the run
│   └── ConflictError      a row that must be unique is there already (a sample claimed twice, say)
├── RenderError        messages cannot become tokens for this model
├── EngineError        an engine failed
│   ├── EngineUnavailable  it cannot be reached or is not ready: try again
│   └── PromptTooLong      prompt + reply exceed the model's context
├── BackendError       a training backend failed
│   ├── NonFiniteError      a loss or gradient is not finite; the step was not applied
│   ├── BackendUnavailable it cannot be reached, or did not answer within the deadline
│   └── BackendLost        it no longer has the training session: load the last saved state, train again
├── DataError          exported data cannot be read, or is not what it says it is
├── SyncError          a policy could not be carried to an engine
├── ScoreError         a scorer could not tell what a session is worth
├── AgentError         an agent program failed
│   └── AgentTimeout       it ran past its deadline
└── Interrupted        the user asked to stop
"""

from __future__ import annotations


class InstarError(Exception):
    """Everything Instar raises on purpose."""


class ConfigError(InstarError):
    pass


class StoreError(InstarError):
    pass


class StoreNewer(StoreError):
    pass


class StoreCorrupt(StoreError):
    pass


class StoreFull(StoreError):
    pass


class ConflictError(StoreError):
    pass


class LeaseLost(StoreError):
    pass


class RenderError(InstarError):
    pass


class EngineError(InstarError):
    pass


class EngineUnavailable(EngineError):
    pass


class PromptTooLong(EngineError):
    pass


class BackendError(InstarError):
    pass


class NonFiniteError(BackendError):
    pass


class BackendUnavailable(BackendError):
    pass


class BackendLost(BackendError):
    pass


class DataError(InstarError):
    pass


class SyncError(InstarError):
    pass


class AgentError(InstarError):
    pass


class AgentTimeout(AgentError):
    pass


class Interrupted(InstarError):
    pass


class ScoreError(InstarError):
    """A scorer could not tell. ``again``: another try may; ``wait``: not sooner than so many seconds."""

    def __init__(self, message: str, *, retryable: bool = False, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after = retry_after
