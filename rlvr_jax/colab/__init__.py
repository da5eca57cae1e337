"""What the cells of the notebooks in colabs/ call; a notebook holds no logic of its own."""
