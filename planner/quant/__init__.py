"""Quantised weights: what a scheme's tensors take, and which modules of a checkpoint have which scheme."""
