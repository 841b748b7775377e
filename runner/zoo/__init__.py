"""Shipped models, data sets and losses in plain PyTorch: what a user's own would look like."""
