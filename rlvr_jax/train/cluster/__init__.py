"""Processes, devices and signals: what makes several hosts act as one program."""

__all__ = [
  "control",
  "multihost",
  "process",
  "sharding",
]
