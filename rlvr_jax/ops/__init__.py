"""Pure array mathematics: no state, no configuration."""
