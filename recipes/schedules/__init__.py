"""The synchronous one-directional schedules side by side: on paper, simulated, measured."""
