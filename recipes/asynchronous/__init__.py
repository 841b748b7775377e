"""Asynchronous pipelines: what late gradients cost in loss."""
