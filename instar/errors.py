"""Instar's exceptions, named after the component that failed."""

from __future__ import annotations


class InstarError(Exception):
    """Base class for all Instar exceptions."""


class ConfigError(InstarError):
    """A setting is invalid or cannot be used on this machine."""


class StoreError(InstarError):
    """An operation on the store failed."""


class StoreTooNew(StoreError):
    """A newer version of Instar wrote the database."""


class StoreCorrupt(StoreError):
    """The file is damaged."""


class StoreFull(StoreError):
    """The disk is full."""


class StoreUnavailable(StoreError):
    """The database is locked, too slow or cannot be reached, which may be temporary."""


class LeaseLost(StoreError):
    """Another process has taken over this process's role in the run."""


class ConflictError(StoreError):
    """A row that must be unique already exists, or a group is already closed."""


class RenderError(InstarError):
    """Messages cannot be rendered to tokens for this model."""


class EngineError(InstarError):
    """An engine failed."""


class EngineUnavailable(EngineError):
    """An engine, a provider or the gateway cannot be reached or is not ready. A retry may succeed."""


class PromptTooLong(EngineError):
    """The prompt does not fit into the model's context."""


class BackendError(InstarError):
    """A training backend failed."""


class NonFiniteError(BackendError):
    """A loss, a gradient or a weight is not finite."""


class BackendUnavailable(BackendError):
    """The backend cannot be reached or did not respond in time."""


class BackendLost(BackendError):
    """The training service lost the session. Training resumes from the last saved state."""


class DataError(InstarError):
    """Data cannot be exported or read, or does not match its manifest."""


class SyncError(InstarError):
    """A policy could not be transferred to an engine."""


class ScoreError(InstarError):
    """A scorer failed. It may be retried if ``retryable``, after ``retry_after`` seconds if that is set."""

    def __init__(self, message: str, *, retryable: bool = False, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.retry_after = retry_after


class AgentError(InstarError):
    """An agent failed."""


class AgentTimeout(AgentError):
    """The agent did not finish in time."""
