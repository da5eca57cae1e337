"""Starts a run from a laptop: on this machine, on TPU VMs, or on Kubernetes. Guide: docs/tpu.md.

Only the standard library, and nothing else of ours: it also works where jax is not installed.
"""

__all__ = [
  "jobset",
  "local",
  "tpu_vm",
  "xpk",
]
