"""Processes, devices and signals: runs several hosts as one program."""

__all__ = [
  "control",
  "multihost",
  "placement",
  "process",
  "sharding",
  "waiting",
]
