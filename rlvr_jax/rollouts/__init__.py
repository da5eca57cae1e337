"""From a draw of problems to a batch; `staleness` says which policy samples which batch."""

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
