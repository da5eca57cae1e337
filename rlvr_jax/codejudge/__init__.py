"""Runs and judges untrusted programs. Needs the standard library only; see README.md.

Imports within this folder are relative, so that it can be copied anywhere.
"""

__all__ = [
  "cgroups",
  "sandbox",
  "tasks",
]
