"""Install what ``runner.memory.solve`` decided on the modules of a stage."""
