"""The recipes of four papers at their own size, over one base that is no recipe of its own."""
