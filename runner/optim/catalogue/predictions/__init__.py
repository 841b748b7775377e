"""The predictions of weights; each module describes one."""
