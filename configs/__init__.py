"""The recipes, installed as `rlvr_jax.configs`; a checkout has a link to this folder."""
