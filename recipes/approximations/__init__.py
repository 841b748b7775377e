"""Approximations together: what each saves and costs, and whether that adds up."""
