"""Plug-ins for other frameworks, which rlvr_jax never imports; each needs the extra of its name."""
