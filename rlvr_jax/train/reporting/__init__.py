"""The output of a run: files, logs and printed lines; none of it changes the computation."""

__all__ = [
  "advice",
  "log",
  "machines",
  "progress",
  "report",
  "writer",
]
