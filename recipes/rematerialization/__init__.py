"""Activation-checkpoint strategies on five models: bytes, what is computed again, and equality, as measured."""
