"""Models, data sets and losses that come with the package, in plain PyTorch like a user's own."""
