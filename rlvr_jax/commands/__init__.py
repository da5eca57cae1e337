"""The commands of the program: train, evaluate, export, and report whether a run fits."""
