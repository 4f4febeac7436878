"""Time and cost for people: a step's phases with what bounds them, then hours, dollars and energy."""

from typing import Any

from planner.plan import Plan
from planner.speed.cost import Amount, Cost, cost_of, length_notes, parse_price
from planner.speed.time import Time, TimedPhase, time_of, why_not

BAR_WIDTH = 24
MINUTE, HOUR, DAY = 60, 3600, 86400


def span(seconds: float) -> str:
    """Return a time for a person: 0.55 s, 12 min, 3.4 h, 2.1 days."""
    for unit, name in ((DAY, "days"), (HOUR, "h"), (MINUTE, "min")):
        if seconds >= (2 * unit if unit == DAY else unit):
            return f"{seconds / unit:.3g} {name}"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1000:.3g} ms"


def dollars(amount: float) -> str:
    """Return dollars with two digits that count."""
    return f"${amount:,.0f}" if amount >= 100 else f"${amount:.2f}"


def between(low: str, high: str) -> str:
    """Return a range, or one figure where both ends read alike."""
    return low if low == high else f"{low} to {high}"


def time_text(plan: Plan, amount: Amount, price: str | None) -> str:
    """Return the lines that `plan` prints below memory."""
    time = time_of(plan, longest=amount.longest_completion)
    if time is None:
        if price is not None:
            parse_price(price)
        return f"Time: {why_not(plan)}"
    what = "One step" if plan.resolved.trains else "One round of requests"
    made = "tokens/s" if plan.resolved.trains else "generated tokens/s"
    lines = [
        f"{what}: about {span(time.step_seconds)} (likely {between(span(time.low), span(time.high))}), "
        f"{time.tokens_per_s:,.0f} {made}, bound by {time.bound_by}"
    ]
    lines += [_bar(phase, time) for phase in time.phases]
    cost = cost_of(time, plan.machine, amount, price)
    lines += cost_lines(cost, time, plan)
    lines += [f"  assumed: {note}" for note in (*length_notes(plan, amount), *time.notes)]
    return "\n".join(lines)


def _bar(phase: TimedPhase, time: Time) -> str:
    filled = round(BAR_WIDTH * phase.seconds / time.step_seconds)
    bar = "#" * filled + "." * (BAR_WIDTH - filled)
    return f"  {phase.name:<14}{bar} {span(phase.seconds):>9}  {phase.bound_by}"


def cost_lines(cost: Cost, time: Time, plan: Plan) -> list[str]:
    """Return hours, dollars and energy as far as they are known."""
    gpus = plan.machine.num_gpus
    rate = cost.price
    hourly = ""
    if rate is not None:
        each = between(dollars(rate.low), dollars(rate.high))
        hourly = f"{each} an hour" + (" a GPU" if gpus > 1 else "")
    if cost.hours is None:
        lines = ["The run: --samples, --total-steps or --lengths FILE says how long it takes"]
        return [*lines, f"  a GPU costs {hourly} ({rate.source})"] if rate is not None else lines
    low, likely, high = (hours * HOUR for hours in cost.hours)
    words = f"{cost.steps:,} steps" if cost.steps != 1 else "1 step"
    text = f"The run: {words}, about {span(likely)} (likely {between(span(low), span(high))})"
    if cost.usd is not None and rate is not None:
        text += f", {between(dollars(cost.usd[0]), dollars(cost.usd[1]))}"
    lines = [text]
    if rate is not None:
        lines.append(f"  at {hourly} ({rate.source})")
    else:
        lines.append("  no price of this card is known: --price 2.4 (dollars for a GPU and hour)")
    if cost.kilowatt_hours is not None:
        lines.append(f"  at most {cost.kilowatt_hours[1]:,.3g} kWh, at the boards' rated power")
    return lines


def document(plan: Plan, amount: Amount, price: str | None) -> dict[str, Any]:
    """Return `time` and `cost` of `plan --json`."""
    time = time_of(plan, longest=amount.longest_completion)
    if time is None:
        if price is not None:
            parse_price(price)
        return {"time": None, "time_unknown": why_not(plan), "cost": None}
    cost = cost_of(time, plan.machine, amount, price)
    hours = cost.hours
    assumed = [*length_notes(plan, amount), *time.notes]
    found = time.to_dict() | {
        "assumptions": assumed,
        "steps": cost.steps,
        "run_hours": round(hours[1], 6) if hours else None,
        "run_hours_low": round(hours[0], 6) if hours else None,
        "run_hours_high": round(hours[2], 6) if hours else None,
    }
    return {"time": found, "cost": cost.to_dict()}
