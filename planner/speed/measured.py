"""The speeds that a plan goes by: what `vramwise profile calibrate` measured on this machine, else the tables'.

The speed model's shares are of a card's sheet: a copy reaches so much of the bandwidth, a link so much of its
theory. What was measured is what is reached, so it is put back to what the sheet would have to say.
"""

from planner.machines.calibration import Calibration
from planner.machines.machine import Machine
from planner.speed.cards import CPU, CardSpeed, card_speed
from planner.speed.parameters import Parameters, parameters
from planner.speed.roofline import LINK_SHARE


def speed_of(machine: Machine) -> tuple[CardSpeed, Parameters] | None:
    """Return a machine's speeds and the model's parameters on it; None where neither was measured or published."""
    card = card_speed(machine.gpu.id) if machine.gpu is not None else None
    found = machine.measured
    if found is None:
        return None if card is None else (card, parameters())
    if card is None:
        if not found.matmul:
            return None
        card = CardSpeed(CPU if machine.cpu else found.gpu, {}, {}, 0, 0, 0, 0)
    return _measured(card, found)


def _measured(card: CardSpeed, found: Calibration) -> tuple[CardSpeed, Parameters]:
    p = parameters()
    links = (found.host_to_device_bytes_per_s, found.device_to_host_bytes_per_s)
    slower = min((each for each in links if each), default=0)
    card = card._replace(
        # tables have the best that anybody measured, calibrations of another day may have less
        measured={**card.measured, **found.matmul},
        bandwidth=found.bandwidth_bytes_per_s / p.bandwidth,
        pcie=slower / LINK_SHARE if slower else card.pcie,
    )
    if found.launch_nanoseconds:
        p = p._replace(launch_s=found.launch_nanoseconds / NANO)
    best = max(found.matmul.values(), default=0)
    if found.attention_flops_per_s and best:
        share = found.attention_flops_per_s / best
        p = p._replace(attention=share, attention_tflops=float(best))
    return card, p


NANO = 10**9


def said(machine: Machine) -> str:
    """Return in words whose speeds a plan goes by; "" for the tables'."""
    found = machine.measured
    if found is None:
        return ""
    what = "matmul, bandwidth and links are" if found.matmul else "bandwidth and link are"
    return f"{what} those measured here on {found.taken_at} (vramwise profile calibrate)"
