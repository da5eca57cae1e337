"""Plug-ins for other frameworks; each needs the pip extra of the same name."""
