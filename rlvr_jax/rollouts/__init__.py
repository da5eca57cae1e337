"""Makes batches of rollouts; `staleness` says which version of the policy samples each batch."""

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
