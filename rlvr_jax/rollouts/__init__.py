"""Samples rollouts in slots, packs and stores them; `schedules` say which policy samples what."""

__all__ = [
  "batch",
  "engine",
  "packing",
  "queue",
  "schedules",
  "store",
]
