"""One table as rows: get, put, put if absent, delete and scan by its key, whose columns come first."""

import sqlite3
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Table", "UnreadableRowError"]

Row = TypeVar("Row")
Columns = tuple[Any, ...]


class UnreadableRowError(Exception):
    """A row that this release did not write, or that was changed by hand."""


class Table(Generic[Row]):
    def __init__(
        self, name: str, column_names: tuple[str, ...], key_width: int, decode: Callable[[Columns], Row]
    ) -> None:
        self.name = name
        self._key_width = key_width
        self._decode = decode
        key = column_names[:key_width]
        names = ", ".join(column_names)
        marks = ", ".join("?" * len(column_names))
        where = " AND ".join(f"{column} = ?" for column in key)
        # Names come from this package's constants; values are always bound.
        self._get = f"SELECT {names} FROM {name} WHERE {where}"  # noqa: S608 -- see above
        self._scan = f"SELECT {names} FROM {name} WHERE {key[0]} = ?"  # noqa: S608 -- see above
        self._order = f" ORDER BY {', '.join(key)}"
        self._put = f"INSERT OR REPLACE INTO {name} ({names}) VALUES ({marks})"  # noqa: S608 -- see above
        self._put_if_absent = f"INSERT OR IGNORE INTO {name} ({names}) VALUES ({marks})"  # noqa: S608 -- see above
        self._delete_all = f"DELETE FROM {name} WHERE {key[0]} = ?"  # noqa: S608 -- see above
        self._delete = f"DELETE FROM {name} WHERE {where}"  # noqa: S608 -- see above

    def get(self, connection: sqlite3.Connection, key: Columns) -> Row | None:
        found = connection.execute(self._get, key).fetchone()
        return None if found is None else self._row(found)

    def scan(self, connection: sqlite3.Connection, app: str, condition: str = "") -> list[Row]:
        """The application's rows, in the order of their keys."""
        return [self._row(found) for found in connection.execute(self._scan + condition + self._order, (app,))]

    def put(self, connection: sqlite3.Connection, values: Columns) -> None:
        connection.execute(self._put, values)

    def put_if_absent(self, connection: sqlite3.Connection, values: Columns) -> Row:
        """Returns the row that stands."""
        connection.execute(self._put_if_absent, values)
        standing = self.get(connection, values[: self._key_width])
        assert standing is not None
        return standing

    def delete(self, connection: sqlite3.Connection, key: Columns) -> None:
        connection.execute(self._delete, key)

    def delete_all(self, connection: sqlite3.Connection, app: str) -> None:
        """The application's rows."""
        connection.execute(self._delete_all, (app,))

    def _row(self, found: Columns) -> Row:
        try:
            return self._decode(found)
        except (TypeError, ValueError) as error:
            key = ", ".join(map(str, found[: self._key_width]))
            raise UnreadableRowError(f"the row ({key}) of {self.name} cannot be read: {error}") from error
