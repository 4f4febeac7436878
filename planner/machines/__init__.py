"""The machine: GPUs, host RAM, links, and what a process takes of them before the first tensor."""
