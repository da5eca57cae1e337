"""Plug-ins for other frameworks; each needs the extra of its name. The package imports none."""
