"""A table that every data-frame library takes, without needing one."""

from __future__ import annotations

from typing import Any

from chakra_et.errors import TraceError


class Table:
    """Columns of equal length by name. ``table["name"]`` is a list; None stands for a missing value.

    ``pandas.DataFrame.from_arrow(table)``, ``polars.DataFrame(table)`` and ``pyarrow.table(table)`` read it
    through the Arrow C stream; ``arrow()``, ``pandas()`` and ``polars()`` do the same. These need pyarrow.
    """

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]

    def __len__(self) -> int:
        """The number of rows."""
        return len(next(iter(self.columns.values()), ()))

    def __repr__(self) -> str:
        return f"Table({len(self):,} rows: {', '.join(self.columns)})"

    def rows(self) -> list[dict[str, Any]]:
        """Each row as a dict."""
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*self.columns.values(), strict=True)]

    def arrow(self) -> Any:
        """A ``pyarrow.Table``. Raises ``TraceError`` where pyarrow is not installed."""
        try:
            import pyarrow
        except ImportError:
            raise TraceError("tables for data-frame libraries need pyarrow: pip install pyarrow") from None
        return pyarrow.table(self.columns)

    def pandas(self) -> Any:
        """A ``pandas.DataFrame``, which needs no pyarrow."""
        import pandas

        return pandas.DataFrame(self.columns)

    def polars(self) -> Any:
        """A ``polars.DataFrame``."""
        import polars

        return polars.from_arrow(self.arrow())

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """The Arrow PyCapsule interface."""
        return self.arrow().__arrow_c_stream__(requested_schema)

    def __dataframe__(self, **options: Any) -> Any:
        """The older interchange protocol of data frames."""
        return self.arrow().__dataframe__(**options)
