"""Plug-ins for other frameworks; each needs the pip extra of its name. rlvr_jax imports none."""
