"""The recipes, installed as `rlvr_jax.configs`, which a checkout has as a link to this folder."""
