"""Weights that a run starts from: found by the headers of their files, and read by the ranks that hold them."""
