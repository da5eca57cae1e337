"""Samples rollouts in slots, packs and stores them; `staleness` says which policy samples what."""

__all__ = [
  "batch",
  "decoder",
  "engine",
  "group",
  "packing",
  "queue",
  "staleness",
  "store",
]
