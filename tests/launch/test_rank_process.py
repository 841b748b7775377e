"""What every rank's process is set to before anything computes."""

from __future__ import annotations

import torch

from runner.config.compose.resolve import resolve
from runner.launch.rank import prepare_process


def test_fp32_products_and_convolutions_keep_all_their_bits() -> None:
    """Torch allows TensorFloat-32 in cuDNN by default; it can be read on a machine without GPUs, too."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    prepare_process(resolve(["model=mlp"]))
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
