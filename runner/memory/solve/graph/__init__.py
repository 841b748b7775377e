"""Strategies on graphs of values instead of chains: pure solvers, whose result is an order of computations."""
