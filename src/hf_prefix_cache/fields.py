"""Reading what a file describes, entry by entry, with an error for each that is not what it has to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .exceptions import SnapshotFileError

__all__ = ["Fields"]


class Fields:
    """The entries of a table that may hold anything.

    Args:
        values: The table.
        where: How errors call it.

    Raises:
        SnapshotFileError: ``values`` is no table.
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise SnapshotFileError(f"{where} is {_shown(values)}; it has to be a table")
        self._values, self._where = values, where

    def text(self, name: str) -> str:
        """Return an entry that is text."""
        value = self._values.get(name)
        return str(self.check(name, isinstance(value, str), value, "text"))

    def optional_text(self, name: str) -> str | None:
        """Return an entry that is text or missing."""
        return None if self._values.get(name) is None else self.text(name)

    def count(self, name: str, *, lowest: int = 0) -> int:
        """Return an entry that is an integer of ``lowest`` or more."""
        value = self._values.get(name)
        self.check(name, type(value) is int and value >= lowest, value, f"an integer of {lowest} or more")
        return int(value or 0)

    def optional_count(self, name: str, *, lowest: int = 0) -> int | None:
        """Return an entry that is such an integer or missing."""
        return None if self._values.get(name) is None else self.count(name, lowest=lowest)

    def flag(self, name: str) -> bool:
        """Return an entry that is true or false."""
        value = self._values.get(name)
        return bool(self.check(name, isinstance(value, bool), value, "true or false"))

    def list(self, name: str) -> list[Any]:
        """Return an entry that is a list of anything."""
        value = self._values.get(name)
        found: list[Any] = self.check(name, isinstance(value, list), value, "a list")
        return found

    def table(self, name: str) -> Fields:
        """Return an entry that is a table."""
        return Fields(self._values.get(name), f"{name} of {self._where}")

    def optional_table(self, name: str) -> Fields | None:
        """Return an entry that is a table or missing."""
        return None if self._values.get(name) is None else self.table(name)

    def tables(self, name: str) -> Iterator[Fields]:
        """Yield the entries of a list of tables."""
        for index, value in enumerate(self.list(name)):
            yield Fields(value, f"{name} {index} of {self._where}")

    def raw(self) -> dict[str, Any]:
        """Return the table as it is."""
        return self._values

    def check(self, name: str, holds: bool, value: Any, rule: str) -> Any:
        """Return ``value`` if the rule holds.

        Raises:
            SnapshotFileError: It does not.
        """
        if not holds:
            raise SnapshotFileError(f"{name} of {self._where} is {_shown(value)}; it has to be {rule}")
        return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
