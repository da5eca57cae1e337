"""What a run writes and prints; nothing here changes what it computes."""

__all__ = [
  "data_use",
  "machines",
  "records",
  "report",
  "run_log",
  "trackers",
  "writer",
]
