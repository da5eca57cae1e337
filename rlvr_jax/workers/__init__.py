"""A pool of worker processes: starts, limits and replaces workers.

Pool and workers exchange messages, which are lines of JSON. The workers run a program: graders
(`rewards.grading`) or environments (`environments.dialogues`). A grader is an environment of one
turn.
"""

__all__ = [
  "pool",
  "process",
  "worker",
]
