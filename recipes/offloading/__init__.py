"""Offload strategies on the models of the recipe of rematerialization, under one budget and links of several speeds."""
