"""The recipes, installed as `rlvr_jax.configs`, which in a checkout is a link to this folder."""
