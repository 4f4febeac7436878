"""How good the doctor and the importers are: parsed, cause_right, precision by certainty, imports_right, claims.

    python -m benchmarks.doctor [--json] [--verbose]

Runs on data/doctor alone. A case becomes the text that its reporter would paste: the message
where it is known (else the printed sizes in the message's form), the frames, the settings.
"""

import argparse
import json
import statistics
from typing import Any

from benchmarks.doctor_messages import score_messages
from benchmarks.foreign_examples import DATA, Example, load_examples, render
from benchmarks.import_checks import import_faults
from planner.doctor.cause import Certainty
from planner.doctor.diagnose import Diagnosis, diagnose
from planner.errors import VramwiseError
from planner.importers import import_config
from planner.importers.names import resolve_model
from planner.machines.machine import Machine, find_gpu
from planner.plan import Plan, plan
from planner.units import GiB

SURE = ("proven by arithmetic", "said by maintainers")


def load(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file of data/doctor."""
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def case_text(case: dict[str, Any]) -> str:
    """Return a case as its reporter would paste it."""
    printed, facts = case["printed"], case["message_facts"]
    parts = []
    if "freed_bytes" in facts and "Sleep mode" not in (case["message_template"] or ""):
        freed, used = facts["freed_bytes"] / GiB, facts["still_in_use_bytes"] / GiB
        parts.append(
            f"Sleep mode freed {freed:.2f} GiB memory, {used:.2f} GiB memory is still in use."
        )
    if case["message_template"]:
        parts.append(case["message_template"])
    elif "tried" in printed:
        message = f"CUDA out of memory. Tried to allocate {printed['tried']}."
        if "total" in printed:
            message += f" GPU {printed.get('gpu', 0)} has a total capacity of {printed['total']}"
        if "free" in printed:
            message += f" of which {printed['free']} is free."
        if "alloc" in printed:
            message += f" Of the allocated memory {printed['alloc']} is allocated by PyTorch,"
        if "unalloc" in printed:
            message += f" and {printed['unalloc']} is reserved by PyTorch but unallocated."
        parts.append(message)
    elif case["kind"].startswith("host_oom"):
        parts.append("Killed: host out of memory (exit code: -9)")
    elif case["kind"] == "cuda_oom":
        parts.append("torch.OutOfMemoryError: CUDA out of memory.")
    parts.append(case["phase_hint"])
    parts += [f"{key}: {value}" for key, value in case["config"].items()]
    return "\n".join(parts)


def parsed_right(case: dict[str, Any], found: Diagnosis) -> bool:
    """Return whether every number that the text prints was read, to the byte."""
    shown = found.parsed
    if case["message_template"]:
        wanted = dict(case["message_facts"])
    else:
        wanted = {
            f"{key}_bytes": case["message_facts"].get(f"{key}_bytes")
            for key in ("tried", "total", "free", "unalloc")
            if key in case["printed"]
        }
    return all(shown.get(key) == value for key, value in wanted.items() if value is not None)


def score_cases(verbose: bool = False) -> dict[str, Any]:
    """Return shares over data/doctor/oom_cases.jsonl."""
    cases = load("oom_cases.jsonl")
    with_numbers = parsed = sure = right = wrong = 0
    sure_of: dict[Certainty, list[bool]] = {certainty: [] for certainty in Certainty}
    for case in cases:
        found = diagnose(case_text(case))
        if case["message_template"] or "tried" in case["printed"]:
            with_numbers += 1
            whole = parsed_right(case, found)
            parsed += whole
            if verbose and not whole:
                print(f"  {case['id']}: numbers {found.parsed} instead of {case['message_facts']}")
        lead = found.failures[0].causes[0]
        good = lead.category == case["category"]
        sure_of[lead.certainty].append(good)
        if case["certainty"] in SURE:
            sure += 1
            right += good
        if lead.certainty.value == "proven by arithmetic" and not good:
            wrong += 1
        if verbose and not good:
            print(
                f"  {case['id']}: {case['category']} ({case['certainty']}) read as {lead.category} ({lead.certainty})"
            )
    return {
        "cases": len(cases),
        "messages": with_numbers,
        "parsed": parsed / with_numbers,
        "sure_cases": sure,
        "cause_right": right / sure,
        "confident_wrong": wrong / len(cases),
        "certainty": {key.value: values for key, values in sure_of.items()},
    }


def score_explain(verbose: bool = False) -> dict[str, Any]:
    """Return the cases, the messages and, over both, how often a certainty was right."""
    cases, messages = score_cases(verbose), score_messages(verbose)
    certain = [cases.pop("certainty"), messages.pop("certainty")]
    precision = {}
    for certainty in (Certainty.PROVEN, Certainty.CONSISTENT):
        values = [good for found in certain for good in found[certainty.value]]
        precision[f"precision_{certainty.name.lower()}"] = sum(values) / len(values)
    return {**cases, **messages, **precision}


def score_imports(verbose: bool = False) -> dict[str, Any]:
    """Return the share of examples whose import agrees with their settings."""
    examples, right = load_examples(), 0
    for example in examples:
        try:
            faults = import_faults(example, import_config(render(example)[1]))
        except VramwiseError as error:
            faults = [error.message]
        right += not faults
        if verbose and faults:
            print(f"  {example.id} {example.tool}: {'; '.join(faults)}")
    return {"examples": len(examples), "imports_right": right / len(examples)}


def claim_plan(example: Example, claim: dict[str, Any]) -> Plan:
    """Return the plan of an example on the claim's machine; raises when the model is unknown."""
    found = import_config(render(example, overrides=True)[1])
    spec = resolve_model(found.run.model)
    if spec is None:
        raise VramwiseError(f"{found.run.model} is not in the catalogue")
    gpus = claim.get("gpus") or found.run.machine.gpus
    gpu = find_gpu(claim["gpu"] or "a100-sxm4-80gb")
    vram = gpu.torch_total_bytes or 80 * GiB
    machine = Machine(
        vram_bytes=vram, num_gpus=gpus, gpu=gpu, context_bytes=gpu.context_bytes or 500 * 2**20
    )
    return plan(spec, found.run.recipe, machine)


def score_claims(verbose: bool = False) -> dict[str, Any]:
    """Return the median error of numeric claims, false "does not fit" and false claims believed."""
    examples = {example.id: example for example in load_examples()}
    errors, false_no, believed, skipped = [], [], [], []
    for claim in load("config_claims.jsonl"):
        if claim["kind"] == "not-scored":
            continue
        try:
            made = claim_plan(examples[claim["id"]], claim)
        except VramwiseError as error:
            skipped.append(f"{claim['id']}: {error.message}")
            continue
        if claim["kind"] == "numeric":
            value = {
                "allocated": made.peak_bytes,
                "reserved": made.reserved_peak_bytes,
                "device": made.device_used_bytes,
            }[claim["quantity"]]
            errors.append(value / GiB / claim["value_gib"] - 1)
            if verbose:
                print(
                    f"  {claim['id']} {examples[claim['id']].tool:<12}{claim['value_gib']:>8.2f} GiB claimed {value / GiB:>8.2f} planned {errors[-1]:+7.1%}"
                )
        elif claim["kind"] == "fits" and not made.tensors_fit:
            false_no.append(claim["id"])
        elif claim["kind"] == "false-claim" and made.tensors_fit:
            believed.append(claim["id"])
    return {
        "numeric_claims": len(errors),
        "claims_median_error": statistics.median(abs(error) for error in errors)
        if errors
        else None,
        "false_does_not_fit": false_no,
        "false_claims_believed": believed,
        "claims_skipped": skipped,
    }


def measure(verbose: bool = False) -> dict[str, Any]:
    """Return the whole document."""
    return {
        "schema_version": 1,
        **score_explain(verbose),
        **score_imports(verbose),
        **score_claims(verbose),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="also print every miss")
    options = parser.parse_args()
    document = measure(options.verbose and not options.json)
    if options.json:
        print(json.dumps(document, indent=2))
        return
    for key, value in document.items():
        print(f"{key:<24}{value:.3f}" if isinstance(value, float) else f"{key:<24}{value}")


if __name__ == "__main__":
    main()
