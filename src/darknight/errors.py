"""Every error that DarKnight raises on purpose.

    DarKnightError
    ├── SchemeError        a scheme that is unsafe or impossible; the message names the remedy
    ├── OpError            an operation with arguments that it does not support
    ├── EncodingError      values that cannot be encoded: not finite, or too large for their range
    ├── RandomnessError    a generator that may not be used here: copied, forked, used up, or asked to repeat itself
    ├── ProtectError       a model that cannot be protected, or is not used as a protected model must be
    ├── FleetError         a fleet that does not fit the scheme or is taken, or a fleet or runtime that is closed
    ├── PlanError          a target that nothing meets with this fleet; the message says what would
    ├── WorkerError        a worker that failed, stopped, or did not keep to the protocol; `worker` is its number
    ├── UsageError         a setting that makes no sense; the message names the remedy
    ├── DataError          data that is missing or malformed
    ├── TrustError         evidence, a key, a receipt or sealed data that is not what it must be; `check` says which
    ├── ServiceError       an enclave that does not answer (`check` is "unreachable"), or says no
    ├── PrivacyBudgetError a step that would show workers more than leakage_budget allows; nothing of it was sent
    ├── RangeError         an honest result that does not fit the field: retry at a smaller scale, blame nobody
    └── IntegrityError     a result that could not be verified, not even without the workers; nothing of it was used

    PrivacyWarning         (a warning) what is done shows workers more than usual

Messages are for people: where, what was found, what was needed, what to do. They never contain data values.
Attributes are for programs.
"""

from __future__ import annotations


class DarKnightError(Exception):
    """The root of the tree."""


class SchemeError(DarKnightError, ValueError):
    """The scheme asks for something unsafe or impossible."""


class OpError(DarKnightError, ValueError):
    """The operation does not support these arguments."""


class EncodingError(DarKnightError, ValueError):
    """The values cannot be encoded."""


class RandomnessError(DarKnightError, RuntimeError):
    """The generator refuses, because going on could use the same noise twice."""


class ProtectError(DarKnightError, RuntimeError):
    """The model cannot be protected like this."""


class FleetError(DarKnightError, RuntimeError):
    """The fleet cannot do this work."""


class PlanError(DarKnightError, ValueError):
    """No scheme meets the target. `remedies`: each a change to what was asked for, alone enough to make it possible."""

    def __init__(self, message: str, *, remedies: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.remedies = remedies


class WorkerError(DarKnightError, RuntimeError):
    """Worker number `worker` failed. Nothing of what it sent was used."""

    def __init__(self, message: str, *, worker: int) -> None:
        super().__init__(message)
        self.worker = worker


class UsageError(DarKnightError, ValueError):
    """A setting makes no sense: an unknown name, or a number out of its range."""


class DataError(DarKnightError, ValueError):
    """The data is missing or malformed."""


class TrustError(DarKnightError, ValueError):
    """Somebody or something is not what it must be. `check` names what did not hold, in one word for programs."""

    def __init__(self, message: str, *, check: str) -> None:
        super().__init__(message)
        self.check = check


class ServiceError(DarKnightError, RuntimeError):
    """The job service does not do what was asked. `check`: "unreachable", or the word of what it found wanting."""

    def __init__(self, message: str, *, check: str) -> None:
        super().__init__(message)
        self.check = check


class PrivacyBudgetError(DarKnightError, RuntimeError):
    """Going on would exceed the budget: `used` of `budget` nats are, and `needed` more would be."""

    def __init__(self, message: str, *, budget: float, used: float, needed: float) -> None:
        super().__init__(message)
        self.budget = budget
        self.used = used
        self.needed = needed


class _CheckError(DarKnightError):
    """A failed check; `kind` is the pass ("forward", "grad_input", "grad_weight"), `check` the method that noticed."""

    def __init__(self, message: str, *, kind: str, check: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.check = check


class RangeError(_CheckError):
    """The result is right modulo the prime but not as an integer: it wrapped around."""


class IntegrityError(_CheckError):
    """The result is wrong. Nothing of it may be used."""


class PrivacyWarning(UserWarning):
    """What is done here is allowed, and shows workers more than usual."""


def other_format(found: object, *, reads: int) -> str:
    """What is said of a file or a message whose number of the format is not the one that is read: which side is older.

    >>> other_format(3, reads=2)
    'format 3, made by a newer version of DarKnight; this one reads format 2. Upgrade DarKnight here'
    """
    if type(found) is int and found > reads:
        return (
            f"format {found}, made by a newer version of DarKnight; this one reads format {reads}. "
            "Upgrade DarKnight here"
        )
    number = f"format {found}" if type(found) is int else "no number of a format"
    return f"{number}, of no version that this one knows; it reads format {reads}. Use the version that made it"
