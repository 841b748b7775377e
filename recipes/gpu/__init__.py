"""What the runner does on one GPU, measured: tables and figures."""
