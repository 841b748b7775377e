"""Decides from a profile and a policy what is kept and what is computed again, and its cost; pure functions."""
