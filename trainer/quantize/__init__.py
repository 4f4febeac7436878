"""Writes four-bit bases that lose less: codes with error feedback, and bytes where they spare most harm."""
