"""Plug-ins for other frameworks; each needs the pip extra of its name. The package imports none."""
