"""Dynamic programs of strategies, on arrays of numbers. They import numpy; strategies import them when they solve."""
