"""An import's report for a person."""

from planner.importers.settings import Imported


def report_text(imported: Imported) -> str:
    """Return what was taken, what was defaulted, what was not understood, and what it does to memory."""
    report = imported.report
    why = report.version_why
    assumed = f" ({why})" if why else ""
    if report.version_assumed:
        assumed = (
            f" ({why}; --tool-version states it)"
            if why
            else " (assumed: the file does not say; --tool-version states it)"
        )
    lines = [f"{report.tool} {report.version}{assumed}: {imported.run.model or 'no model'}"]
    if report.taken:
        taken = ", ".join(f"{row.key}={row.value[:40]}" for row in report.taken)
        lines.append(f"  taken: {taken}")
    if report.defaulted:
        rows = ", ".join(f"{row.field}={row.value}" for row in report.defaulted)
        lines.append(f"  {report.tool}'s defaults: {rows}")
    lines += [
        f"  not understood: {row.key}={row.value[:60]} ({row.effect})"
        for row in report.not_understood
    ]
    lines += [f"  note: {sentence}" for sentence in report.effects]
    if report.ignored:
        lines.append(f"  {report.ignored} keys without an effect on memory")
    return "\n".join(lines)
