"""The settings of four papers at their own size, and the base that they start from."""
