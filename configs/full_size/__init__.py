"""Recipes with the settings of four papers at full size, and the base that they share."""
