"""Starts a run: as processes here, on TPU VMs, or on GKE through xpk. Guide: docs/launch.md.

It imports only the standard library and nothing else of rlvr_jax, so that it works without jax.
"""

__all__ = [
  "local",
  "tpu_vm",
  "xpk",
]
