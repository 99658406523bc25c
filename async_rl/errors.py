"""Every error async-rl raises on purpose.

    AsyncRLError                what happened, to what; `hint` says what to do next
    ├── ConfigError             a run file or an option is wrong
    ├── StoreError              the object store refused or failed
    │   ├── NotFound            no such key
    │   ├── AlreadyExists       a create-only put met an object
    │   ├── BucketMissing       the bucket itself is not there
    │   ├── AccessDenied        credentials are missing, wrong, or not allowed this
    │   └── StoreUnavailable    unreachable, slow, or 5xx, beyond the retry limit
    ├── WeightsError            a version can't be published, read or verified
    │   ├── Corrupt             bytes differ from their recorded hash
    │   ├── ModelMismatch       this model is not the run's model
    │   └── Fenced              a newer trainer owns the run: this one must stop
    ├── ProtocolError           a message could not be accepted
    │   ├── Malformed           not a message of this protocol (schema, size)
    │   ├── NotAllowed          its sender's key is unknown or revoked, or may not say this
    │   └── Refused             the other side said no, and asking again can't help
    ├── WaitTimeout             a wait reached its limit; says what was awaited
    ├── EnvironmentFailed       the user's environment or reward function raised
    ├── EngineError             the inference engine failed
    ├── TrainingError           the optimisation can't go on (too many non-finite steps, …)
    ├── CheckpointError         a checkpoint can't be written or read
    └── ProcessFailed           a child process ended that should not have

The CLI prints `message` and `hint` and exits with status 1 (2 for ConfigError, as click does for usage).
"""

from __future__ import annotations

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "AsyncRLError",
    "BucketMissing",
    "CheckpointError",
    "ConfigError",
    "Corrupt",
    "EngineError",
    "EnvironmentFailed",
    "Fenced",
    "Malformed",
    "ModelMismatch",
    "NotAllowed",
    "NotFound",
    "ProcessFailed",
    "ProtocolError",
    "Refused",
    "StoreError",
    "StoreUnavailable",
    "TrainingError",
    "WaitTimeout",
    "WeightsError",
]


class AsyncRLError(Exception):
    """The root of the tree: `message` says what happened and to what, `hint` what to do next."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(AsyncRLError):
    exit_code = 2


class StoreError(AsyncRLError):
    pass


class NotFound(StoreError):
    pass


class AlreadyExists(StoreError):
    pass


class BucketMissing(StoreError):
    pass


class AccessDenied(StoreError):
    pass


class StoreUnavailable(StoreError):
    pass


class WeightsError(AsyncRLError):
    pass


class Corrupt(WeightsError):
    pass


class ModelMismatch(WeightsError):
    pass


class Fenced(WeightsError):
    pass


class ProtocolError(AsyncRLError):
    pass


class Malformed(ProtocolError):
    pass


class NotAllowed(ProtocolError):
    """`code`: to count by; `retry`: the same message may be taken later; `revoked`: the name of the key, where
    it was allowed before."""

    def __init__(
        self, message: str, *, hint: str = "", code: str = "key", retry: bool = False, revoked: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.retry = retry
        self.revoked = revoked


class Refused(ProtocolError):
    pass


class WaitTimeout(AsyncRLError):
    pass


class EnvironmentFailed(AsyncRLError):
    pass


class EngineError(AsyncRLError):
    pass


class TrainingError(AsyncRLError):
    pass


class CheckpointError(AsyncRLError):
    pass


class ProcessFailed(AsyncRLError):
    pass
