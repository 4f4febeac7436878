"""A server's view as text: the cache, requests at once, the longest, adapters, and what to change."""

from typing import TYPE_CHECKING

from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.answers.serving import ServingView
    from planner.answers.serving_changes import Rescue

MOST_CHANGES = 8


def headline(view: "ServingView") -> str:
    """Return what the server holds, or why it refuses to start."""
    if not view.starts:
        return f"Does not start: {view.why}"
    given = next(row for row in view.requests if row.given)
    sides = f" on {view.engines} engines side by side" if view.engines > 1 else ""
    return (
        f"Starts: {view.figures.kv_tokens:,} tokens of KV cache, {given.at_once:,} request"
        f"{'' if given.at_once == 1 else 's'} of {given.tokens:,} tokens at once{sides}"
    )


def serving_text(view: "ServingView") -> str:
    """Return the view as lines of text."""
    lines = [headline(view)]
    if view.starts:
        lines += [f"  {line}" for line in (*_cache(view), *_requests(view), *_more(view))]
    if view.changes:
        title = "What gives more room:" if view.starts else "What makes it start:"
        lines += ["", title, *(f"  {change_line(each)}" for each in view.changes[:MOST_CHANGES])]
    elif not view.starts:
        lines += ["", "No change of settings or of up to 16 GPUs makes it start."]
    return "\n".join(lines)


def change_line(change: "Rescue") -> str:
    """Return one change: as vLLM takes it, what the server then holds, the price."""
    holds = f"{change.kv_tokens:,} tokens, {change.at_once:.1f} x {change.max_model_len:,}"
    return f"{change.words:<40} {holds:<28} {change.price}".rstrip()


def _cache(view: "ServingView") -> list[str]:
    kv = view.figures.kv
    spread = f"likely {format_bytes(max(0, kv.low))} to {format_bytes(kv.high)}"
    each = f", {view.bytes_per_token:,} B a token" if view.bytes_per_token else ""
    return [f"KV cache: {format_bytes(kv.typical)} a GPU ({spread}){each}"]


def _requests(view: "ServingView") -> list[str]:
    lines = ["Requests at once, prompt and answer together:"]
    for row in view.requests:
        mark = "  <- asked" if row.given else ""
        limit = "" if row.by == "cache" else "  all of --max-num-seqs"
        low = f" (at least {row.low:,})" if row.low < row.at_once else ""
        lines.append(f"  {row.tokens:>9,} tokens {row.at_once:>7,}{low}{limit}{mark}")
    return lines


def _more(view: "ServingView") -> list[str]:
    lines = []
    made = f", the model was made for {view.made_for:,}" if view.made_for else ""
    lines.append(f"Longest request that starts: {view.longest:,} tokens (--max-model-len){made}")
    slots, prefix = view.slots, view.prefix
    if slots is not None:
        now = f"{slots.now} slots" if slots.now else "none"
        lines.append(
            f"LoRA slots: {now}; one of rank {slots.rank} takes {format_bytes(slots.slot_bytes)} = "
            f"{slots.slot_tokens:,} tokens; at most {slots.most:,} start"
        )
    if prefix is not None:
        how = "on" if prefix.enabled else "off"
        lines.append(
            f"Prefix cache {how}: with the first {prefix.tokens:,} tokens the same, {prefix.at_once:,} "
            f"requests of {prefix.request_tokens:,} at once; {prefix.alone:,} without"
        )
    return lines
