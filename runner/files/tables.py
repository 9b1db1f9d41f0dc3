"""Tables for people."""

from rich.table import Table


def table_of_figures(first: str, *figures: str) -> Table:
    """A table with these headers: names in the first column, figures in the others."""
    table = Table()
    table.add_column(first)
    for header in figures:
        table.add_column(header, justify="right")
    return table
