"""Plug-ins for other frameworks. Each module needs the extra of its name; nothing imports them."""
