"""What a run writes and prints; nothing here changes what it computes."""

__all__ = [
  "advice",
  "log",
  "machines",
  "progress",
  "report",
  "writer",
]
