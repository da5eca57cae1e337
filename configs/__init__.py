"""The recipes, installed as `rlvr_jax.configs`; in a checkout that is a link to this folder."""
