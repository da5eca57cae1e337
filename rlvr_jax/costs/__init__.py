"""Costs of compiled programs: FLOPs, bytes, collectives, memory and seconds on a TPU."""

__all__ = [
  "chips",
  "hlo",
  "hlo_text",
  "memory",
  "programs",
  "step_time",
]
