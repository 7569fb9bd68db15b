"""Every error that a user of this package can meet.

Each class subclasses the builtin that describes the same kind of failure, so ``except ValueError`` keeps working, and
`PrefixCacheError`, so that one ``except`` clause catches them all. Messages name the argument, the rule, the value and
the remedy. After any of them the cache, the store and the files are as they were before the call.
"""

__all__ = [
    "BatchSizeError",
    "CacheCapacityError",
    "FingerprintMismatchError",
    "IncompatibleTransformersError",
    "InputMismatchError",
    "InvalidBudgetError",
    "InvalidTokensError",
    "LossyPrefixError",
    "MissingPackageError",
    "NotCroppableError",
    "OffloadError",
    "PrefixCacheError",
    "RequestError",
    "SnapshotFileError",
    "SnapshotIncompleteError",
    "StoreIntegrityError",
    "UnknownOptionError",
    "UnknownStrategyError",
    "UnsupportedLayerError",
    "UnsupportedModelError",
]


class PrefixCacheError(Exception):
    """Base class of every error raised on purpose by this package."""


class IncompatibleTransformersError(PrefixCacheError, ImportError):
    """The installed Transformers release lacks a name that this package relies on."""


class MissingPackageError(PrefixCacheError, ImportError):
    """An optional package is needed for what was asked; the message gives the install command."""


class UnknownStrategyError(PrefixCacheError, ValueError):
    """The strategy name is not one of the ``prefix-*`` names."""


class UnknownOptionError(PrefixCacheError, ValueError):
    """An option does not exist, or does not belong to the strategy it was given with."""


class UnsupportedLayerError(PrefixCacheError, TypeError):
    """A layer of the model keeps a kind of state that this cache cannot hold exactly."""


class UnsupportedModelError(PrefixCacheError, TypeError):
    """The model cannot be served exactly by what was asked; the message says what to use instead."""


class NotCroppableError(PrefixCacheError, RuntimeError):
    """The cache cannot go back to the asked length exactly; nothing was changed."""


class CacheCapacityError(PrefixCacheError, ValueError):
    """More tokens than a static cache, a model or a budget can hold."""


class BatchSizeError(PrefixCacheError, ValueError):
    """The number of rows does not fit the cache."""


class InputMismatchError(PrefixCacheError, ValueError):
    """Arguments that must agree with each other or with the cache (mask, ids, lengths) do not."""


class InvalidTokensError(PrefixCacheError, ValueError):
    """Token ids that are empty, not integers or out of the vocabulary."""


class FingerprintMismatchError(PrefixCacheError, ValueError):
    """A snapshot was made by another model, or by this model in another state."""


class SnapshotIncompleteError(PrefixCacheError, ValueError):
    """A snapshot lacks what the operation needs (token ids, fingerprint or next logits)."""


class SnapshotFileError(PrefixCacheError, ValueError):
    """A snapshot file is cut off, damaged, of an unknown version, or not one at all."""


class OffloadError(PrefixCacheError, OSError):
    """The folder that offloaded keys and values go to cannot be written to, is gone, or has no room."""


class InvalidBudgetError(PrefixCacheError, ValueError):
    """A number of bytes, such as a store's budget, is not an integer in the allowed range."""


class StoreIntegrityError(PrefixCacheError, RuntimeError):
    """A store found itself inconsistent: a defect of this package, not of what it was given."""


class LossyPrefixError(PrefixCacheError, ValueError):
    """A lossy prefix was about to be mixed with exact ones without being asked for by name."""


class RequestError(PrefixCacheError, ValueError):
    """A scoring request is malformed; the message names its index."""
