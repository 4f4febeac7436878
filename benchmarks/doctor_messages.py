"""What `explain` makes of messages of launchers, hosts, engines and drivers, as reported and reworded.

    python -m benchmarks.doctor_messages [--verbose]

Runs on data/doctor/messages.jsonl. A row holds a short message with its source and the right answer:
the kind of event, the categories that are right, those that must not be named, words of which the
advice must hold one, and what the answer must say. Every row is also read as other people paste it:
with a rank's prefix, colours, a docker compose prefix, Windows line ends, and inside a longer log.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from benchmarks.foreign_examples import DATA
from planner.doctor.cause import Certainty
from planner.doctor.diagnose import Diagnosis, diagnose
from planner.doctor.report import diagnosis_dict, diagnosis_text

FILLER = "{'loss': 1.25, 'grad_norm': 0.5, 'epoch': 0.1}\n"


def load_messages() -> list[dict[str, Any]]:
    """Return the rows of data/doctor/messages.jsonl."""
    lines = (DATA / "messages.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def variants(text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of a message as other people paste it."""
    yield "plain", text + "\n"
    yield "windows", text.replace("\n", "\r\n") + "\r\n"
    yield "coloured", "\n".join(f"\x1b[31m{line}\x1b[0m" for line in text.split("\n"))
    yield "in a log", FILLER * 40 + text + "\n" + FILLER * 3
    yield "quoted", "I get this, any idea?\n\n```\n" + text + "\n```\nthanks"
    if not text.lstrip().startswith(("(", "[")):
        yield "compose", "\n".join(f"trainer-1  | {line}" for line in text.split("\n"))
        yield "rank", "\n".join(f"[rank3]: {line}" for line in text.split("\n"))


def faults(row: dict[str, Any], found: Diagnosis) -> list[str]:
    """Return what is wrong with an answer, [] when it is right."""
    document, text = diagnosis_dict(found), diagnosis_text(found)
    lead, wrong = document["causes"][0], []
    if row["kind"] and document["kind"] != row["kind"]:
        wrong.append(f"kind {document['kind']}")
    if lead["category"] not in row["categories"]:
        wrong.append(f"category {lead['category']}")
    named = {cause["category"] for error in document["errors"] for cause in error["causes"]}
    wrong += [f"named {category}" for category in sorted(named & set(row["absent"]))]
    advice = " ".join(fix["change"] for error in document["errors"] for fix in error["fixes"])
    if row["advice"] and not any(word.lower() in advice.lower() for word in row["advice"]):
        wrong.append("advice")
    if not advice:
        wrong.append("no next step")
    for said in row["says"]:
        what, _, value = said.partition(":")
        holds = {
            "certainty": lambda value=value: lead["certainty"] == value,
            "notcertainty": lambda value=value: lead["certainty"] != value,
            "errors": lambda value=value: len(document["errors"]) == int(value),
            "text-not": lambda value=value: value not in text,
        }.get(what, lambda said=said: said.lower() in text.lower())
        if not holds():
            wrong.append(f"says {said}")
    return wrong


def score_messages(verbose: bool = False) -> dict[str, Any]:
    """Return how many messages are read right, as reported and reworded, and precision by certainty."""
    rows = load_messages()
    right = reworded = reworded_right = 0
    sure: dict[Certainty, list[bool]] = {certainty: [] for certainty in Certainty}
    for row in rows:
        for name, text in variants(row["text"]):
            found = diagnose(text, **row["flags"])
            wrong = faults(row, found)
            if name == "plain":
                right += not wrong
            else:
                reworded, reworded_right = reworded + 1, reworded_right + (not wrong)
            lead = found.failures[0].causes[0]
            sure[lead.certainty].append(lead.category in row["categories"])
            if verbose and wrong:
                print(f"  {row['id']} {name}: {'; '.join(wrong)}")
    return {
        "messages_read": len(rows),
        "messages_right": right / len(rows),
        "reworded": reworded,
        "reworded_right": reworded_right / reworded,
        "certainty": {key.value: values for key, values in sure.items()},
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="also print every miss")
    document = score_messages(parser.parse_args().verbose)
    for certainty, values in document.pop("certainty").items():
        if values:
            print(f"precision, {certainty:<22}{sum(values) / len(values):.3f} of {len(values)}")
    for key, value in document.items():
        print(f"{key:<24}{value:.3f}" if isinstance(value, float) else f"{key:<24}{value}")


if __name__ == "__main__":
    main()
