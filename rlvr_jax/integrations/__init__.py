"""Plug-ins for other frameworks; each needs the pip extra of its name.

The rest of rlvr_jax imports no plug-in.
"""
