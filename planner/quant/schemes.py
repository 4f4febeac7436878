"""What one quantised weight takes: packed codes, scales, zero points and tables, by scheme.

Sources: bitsandbytes 0.50 functional.py (quantize_4bit, int8_vectorwise_quant), gptqmodel 5
nn_modules/qlinear (qweight, qzeros, scales), compressed-tensors 0.15 compressors (pack-quantized,
nvfp4-pack-quantized), transformers 5.19 integrations/finegrained_fp8.py and mxfp4.py, torchao 0.17
int4 and int8 tensors, quark's per-channel export, hqq 0.2 core/quantize.py, OCP MX 1.0.
"""

from dataclasses import dataclass
from fractions import Fraction

from planner.dtypes import GGUF_BYTES, QUANTIZATIONS
from planner.errors import UsageError

NF4_BLOCK = 64
"""bitsandbytes: weights that share one absmax."""
NF4_NESTED_BLOCK = 256
"""bitsandbytes: absmax values that share one second-level absmax."""
NF4_TABLE_BYTES = 16 * 4
NESTED_TABLE_BYTES = 256 * 4
GPTQ_GROUP = 128
FP8_BLOCK = 128
MX_BLOCK = 32
NVFP4_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a weight [rows, columns] is stored: codes of `bits`, and constants for every group."""

    name: str
    bits: Fraction
    group: int = 0
    """Weights of one row that share a scale; 0: the whole row; -1: the whole tensor."""
    group_rows: int = 1
    """Rows that share it too (FP8 blocks)."""
    constant: Fraction = Fraction(0)
    """Bytes of constants for a group: scale, and zero point where there is one."""
    fixed: int = 0
    """Bytes a tensor: a global scale, code tables."""
    nested: bool = False
    """bitsandbytes: the scales are quantised again."""

    def bytes(self, rows: int, columns: int) -> int:
        """Return what a weight of this shape takes, constants included."""
        numel = rows * columns
        size = -(-numel * self.bits // 8) + self.fixed
        if self.name in ("nf4", "fp4"):
            blocks = -(-numel // self.group)
            return int(size + self._absmax(blocks))
        if self.group < 0:
            groups = 1
        else:
            along = -(-columns // self.group) if self.group else 1
            groups = -(-rows // self.group_rows) * along
        return int(size + groups * self.constant // 1)

    def _absmax(self, blocks: int) -> int:
        """Return bitsandbytes' constants: fp32, or a byte each with a second level of fp32 ones."""
        if not self.nested:
            return 4 * blocks
        # the second level keeps an offset scalar and its own 256-entry table
        return blocks + 4 * -(-blocks // NF4_NESTED_BLOCK) + 4 + NESTED_TABLE_BYTES


def bnb_4bit(name: str, *, nested: bool, block: int = NF4_BLOCK) -> Scheme:
    """Return bitsandbytes' nf4 or fp4."""
    return Scheme(name, Fraction(4), block, fixed=NF4_TABLE_BYTES, nested=nested)


def bnb_int8() -> Scheme:
    """Return bitsandbytes' LLM.int8: a byte a weight, one fp32 scale a row."""
    return Scheme("int8", Fraction(8), constant=Fraction(4))


def integer(
    name: str, bits: int, group: int, *, scale: int = 2, zeros: bool = True, packed: int = 0
) -> Scheme:
    """Return packed integers with a scale of `scale` bytes a group and zero points of `bits`.

    `packed`: codes in one 32-bit word where they do not fill it (HQQ's 3-bit: 10).
    """
    constant = Fraction(scale) + (Fraction(bits, 8) if zeros else 0)
    width = Fraction(32, packed) if packed else Fraction(bits)
    return Scheme(name, width, group, constant=constant)


def hqq(bits: int, group: int) -> Scheme:
    """Return HQQ: a 16-bit scale and zero a group; 3-bit codes are packed ten to a word."""
    return Scheme(
        f"hqq-{bits}bit",
        Fraction(32, 10) if bits == 3 else Fraction(bits),
        group,
        constant=Fraction(4),
    )


def floating(name: str, *, per: str, scale: int = 4, block: tuple[int, int] = (0, 0)) -> Scheme:
    """Return 8-bit floats with a scale a "tensor", "row" or "block"."""
    if per == "block":
        return Scheme(name, Fraction(8), block[1], block[0], constant=Fraction(scale))
    return Scheme(name, Fraction(8), -1 if per == "tensor" else 0, constant=Fraction(scale))


def mx(name: str, bits: int) -> Scheme:
    """Return OCP microscaling: blocks of 32 with one exponent byte."""
    return Scheme(name, Fraction(bits), MX_BLOCK, constant=Fraction(1))


def nvfp4(group: int = NVFP4_BLOCK) -> Scheme:
    """Return NVFP4: blocks of 16 with an FP8 scale, and one fp32 scale a tensor."""
    return Scheme("nvfp4", Fraction(4), group, constant=Fraction(1), fixed=4)


def chosen(name: str, *, double_quant: bool) -> Scheme:
    """Return the scheme a recipe names, as its library writes it by default."""
    made = {
        "nf4": bnb_4bit("nf4", nested=double_quant),
        "fp4": bnb_4bit("fp4", nested=double_quant),
        "int8": bnb_int8(),
        "fp8": floating("fp8", per="tensor"),
        "fp8-block": floating("fp8-block", per="block", block=(FP8_BLOCK, FP8_BLOCK)),
        "gptq-4bit": integer("gptq-4bit", 4, GPTQ_GROUP),
        "gptq-8bit": integer("gptq-8bit", 8, GPTQ_GROUP),
        "awq-4bit": integer("awq-4bit", 4, GPTQ_GROUP),
        "hqq-4bit": hqq(4, 64),
        "mxfp4": mx("mxfp4", 4),
        "nvfp4": nvfp4(),
    }.get(name)
    if made is None and name in GGUF_BYTES:
        made = Scheme(name, Fraction(GGUF_BYTES[name]) * 8)
    if made is None:
        raise UsageError(f"quantization: {name!r} is not known", hint=", ".join(QUANTIZATIONS))
    return made


def quantized_bytes(numel: int, scheme: str, *, double_quant: bool, columns: int) -> int:
    """Return bytes of `numel` weights in rows of `columns`, stored as the recipe's `scheme`."""
    columns = max(1, columns)
    return chosen(scheme, double_quant=double_quant).bytes(-(-numel // columns), columns)
