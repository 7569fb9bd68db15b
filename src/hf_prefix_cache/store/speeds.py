"""How fast prefixes are computed and brought back: measured, so that a slow tier is not asked."""

from collections import OrderedDict

__all__ = ["Speeds"]

_FEWEST = 32  # tokens of a prefill that is measured: shorter ones say more about overheads
_MODELS = 64  # model states whose speed is remembered
_KEPT = 0.8  # part of what was known that stays with each measurement of a tier, whose speed varies


class Speeds:
    """Seconds per token of each model state, measured once, and bytes per second of each tier, measured always."""

    def __init__(self) -> None:
        self._seconds_per_token: OrderedDict[str, float] = OrderedDict()
        self._bytes_per_second: dict[str, float] = {}

    @property
    def seconds_per_token(self) -> float | None:
        """Of the model that was measured last."""
        return next(reversed(self._seconds_per_token.values()), None)

    def wants(self, fingerprint: str, tokens: int) -> bool:
        """Return whether a prefill of ``tokens`` is to be measured."""
        return tokens >= _FEWEST and fingerprint not in self._seconds_per_token

    def computed(self, fingerprint: str, tokens: int, seconds: float) -> None:
        """Note what a prefill took."""
        self._seconds_per_token[fingerprint] = seconds / tokens
        while len(self._seconds_per_token) > _MODELS:
            self._seconds_per_token.popitem(last=False)

    def moved(self, tier: str, nbytes: int, seconds: float) -> None:
        """Note what moving ``nbytes`` from or to ``tier`` took."""
        speed = nbytes / max(seconds, 1e-9)
        known = self._bytes_per_second.get(tier, speed)
        self._bytes_per_second[tier] = _KEPT * known + (1 - _KEPT) * speed

    def of(self, tier: str) -> float | None:
        """Return the bytes per second of ``tier``, or None before it was used."""
        return self._bytes_per_second.get(tier)

    def is_worth(self, tier: str, fingerprint: str, nbytes: int, tokens: int) -> bool:
        """Return whether ``nbytes`` come from ``tier`` faster than ``tokens`` are computed; yes while unknown."""
        seconds, speed = self._seconds_per_token.get(fingerprint), self._bytes_per_second.get(tier)
        return seconds is None or speed is None or nbytes / speed < tokens * seconds
