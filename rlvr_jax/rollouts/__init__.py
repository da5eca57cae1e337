"""Makes batches of rollouts from draws of problems; `staleness` says which policy samples them."""

__all__ = [
  "answers",
  "batch",
  "batches",
  "decoder",
  "dialogues",
  "engine",
  "grading",
  "group",
  "packing",
  "programs",
  "recorded",
  "sampler",
  "sources",
  "staleness",
  "store",
]
