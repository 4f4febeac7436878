"""A plan for people to read, keep and pass on: text, tables, a page, a badge."""

from planner.report.text import (
    bar,
    fullest_rank,
    layout_line,
    layout_table,
    summary,
    table,
    text,
    verdict_line,
)

__all__ = [
    "bar",
    "fullest_rank",
    "layout_line",
    "layout_table",
    "summary",
    "table",
    "text",
    "verdict_line",
]
