"""The commands of the program, such as train, eval, export, check, sweep, costs and view."""
