"""Installs an activation plan, which ``runner.memory.solve`` has made, on the modules of a stage."""
