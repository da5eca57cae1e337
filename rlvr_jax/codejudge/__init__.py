"""Runs and judges untrusted programs. Needs only the standard library; see README.md.

Imports within this folder are relative, so the folder can be copied anywhere.
"""

__all__ = [
  "cgroups",
  "fences",
  "sandbox",
  "tasks",
]
