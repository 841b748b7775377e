"""How fast the runner is, each time as a ratio measured in one run."""
