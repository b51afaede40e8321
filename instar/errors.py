"""Instar's exceptions, grouped by the component that failed.

InstarError
├── ConfigError        a setting is invalid or cannot be used on this machine
├── StoreError         an operation on the store failed
│   ├── StoreTooNew        a newer version of Instar wrote the database
│   ├── StoreOutdated      an older version of Instar wrote the database, and it was opened read-only
│   ├── StoreCorrupt       the file is damaged
│   ├── StoreFull          the disk is full
│   ├── StoreUnavailable   the database cannot be reached
│   ├── LeaseLost          another process has taken over this process's role in the run
│   ├── ConflictError      a row that must be unique already exists, or a group is already closed
│   └── SessionNotFound    a row belongs to a session that does not exist or was deleted
├── RenderError        messages cannot be rendered to tokens for this model
├── EngineError        an engine failed
│   ├── EngineUnavailable  an engine, a provider or the gateway cannot be reached or is not ready: retry
│   ├── PromptTooLong      the prompt does not fit into the model's context
│   ├── ConstraintError    the engine cannot enforce the required form of a reply
│   ├── PolicyNotFound     the engine does not have the requested version of a policy
│   └── PoliciesInUse      the engine has no room for another version until requests have finished: retry
├── GatewayError       the gateway rejected a request of `instar.client`
│   └── RunFinished        the run has trained all its steps and accepts no more groups
├── BackendError       a training backend failed
│   ├── NonFiniteError     a loss, a gradient or a weight is not finite
│   ├── BackendUnavailable the backend cannot be reached or did not respond in time
│   └── BackendLost        the training service lost the session: resume from the last saved state
├── DataError          data cannot be exported or read, or does not match its manifest
├── SyncError          a policy could not be transferred to an engine
├── ScoreError         a scorer could not score a session
└── AgentError         an agent failed
    └── AgentTimeout       the agent did not finish in time
"""

from __future__ import annotations


class InstarError(Exception):
    """Base class for all Instar exceptions."""


class ConfigError(InstarError):
    pass


class StoreError(InstarError):
    pass


class StoreTooNew(StoreError):
    pass


class StoreOutdated(StoreError):
    pass


class StoreCorrupt(StoreError):
    pass


class StoreFull(StoreError):
    pass


class StoreUnavailable(StoreError):
    """The database is locked, too slow or cannot be reached, which may be temporary."""


class LeaseLost(StoreError):
    pass


class ConflictError(StoreError):
    pass


class SessionNotFound(StoreError):
    pass


class RenderError(InstarError):
    pass


class EngineError(InstarError):
    pass


class EngineUnavailable(EngineError):
    pass


class PromptTooLong(EngineError):
    pass


class ConstraintError(EngineError):
    pass


class PolicyNotFound(EngineError):
    pass


class PoliciesInUse(EngineError):
    pass


class GatewayError(InstarError):
    def __init__(self, message: str, *, status: int, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """The error code, such as ``group_not_found``, or None if the response has none."""


class RunFinished(GatewayError):
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


class ScoreError(InstarError):
    """A scorer failed. It may be retried if ``retryable``, after ``retry_after`` seconds if that is set."""

    def __init__(self, message: str, *, retryable: bool = False, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after = retry_after


class AgentError(InstarError):
    pass


class AgentTimeout(AgentError):
    pass
