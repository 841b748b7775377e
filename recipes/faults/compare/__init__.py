"""Time to a number of steps under the same kills: the runner beside Lightning and torchrun."""
