"""What ranks send each other outside steps."""

from __future__ import annotations

import pickle

import torch

from runner.strategy.collectives import sendable


def test_a_part_of_a_large_tensor_is_sent_without_the_rest() -> None:
    """Weights and their states are parts of flat buffers: each would carry the whole buffer along."""
    flat = torch.arange(100_000.0)
    state = {"weights": [flat[:10], flat[10:30].view(4, 5)], "step": (torch.tensor(3.0), 7), "whole": flat}
    got = pickle.loads(pickle.dumps(sendable(state)))
    assert len(pickle.dumps(sendable(state))) < flat.nbytes + 10_000
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got["weights"], state["weights"], strict=True))
    assert got["step"] == (torch.tensor(3.0), 7)
    assert torch.equal(got["whole"], flat)
