"""Costs of compiled programs: FLOPs, bytes, collectives, memory and seconds on a TPU or a GPU."""

__all__ = [
  "chips",
  "gpus",
  "hlo",
  "launches",
  "memory",
  "programs",
  "report",
  "workload",
]
