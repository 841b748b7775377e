"""Experiments: data, model, commands and results. No engine code."""
