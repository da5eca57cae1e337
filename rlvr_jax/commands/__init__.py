"""What the program can do: train, evaluate, export, tell whether a configuration fits."""
