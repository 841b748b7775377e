"""Planners of ``parallelism=auto`` on the same workloads, judged by the same plans."""
