"""The synchronous schedules side by side: on paper, simulated, measured."""
