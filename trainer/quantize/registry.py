"""The formats that are written, by the words of --format."""

from trainer.quantize.bnb import BitsAndBytes
from trainer.quantize.compressed import CompressedTensors
from trainer.quantize.formats import Format

WORDS = ("bnb", "compressed-tensors", "both")


def formats(word: str) -> tuple[Format, ...]:
    """Return the formats that one of WORDS names."""
    both: tuple[Format, ...] = (BitsAndBytes(), CompressedTensors())
    return both if word == "both" else tuple(each for each in both if each.name == word)
