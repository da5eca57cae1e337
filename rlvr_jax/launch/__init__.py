"""Starts a run from a laptop: on this machine, on TPU VMs, or on Kubernetes. Guide: docs/tpu.md.

Imports only the standard library, and nothing else of rlvr_jax, so it works without jax.
"""

__all__ = [
  "jobset",
  "local",
  "tpu_vm",
  "xpk",
]
