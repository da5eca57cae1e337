"""One pool of worker processes: start, limit, replace; a message is a line of JSON.

The workers run a program of the room that uses them: graders (`rewards.grading`), environments
(`environments.dialogues`). A grader is an environment of one turn.
"""

__all__ = [
  "pool",
  "process",
  "worker",
]
