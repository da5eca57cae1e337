"""Costs of compiled programs: FLOPs, bytes, collectives, memory and seconds on a TPU or a GPU."""
