"""What every rank's process is set to before anything computes."""

from __future__ import annotations

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.launch.rank import prepare_process, process_group


def test_fp32_products_and_convolutions_keep_all_their_bits() -> None:
    """Torch allows TensorFloat-32 in cuDNN by default; it can be read on a machine without GPUs, too."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    prepare_process(resolve(["model=mlp"]))
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32


def test_a_name_that_no_network_interface_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is advised reaches other machines, too."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth7")])
    told = r"GLOO_SOCKET_IFNAME = nosuch0: must be a network interface.*GLOO_SOCKET_IFNAME=eth7"
    with pytest.raises(RequestError, match=told), process_group(resolve(["model=mlp", "device=cpu"]), HashStore()):
        raise AssertionError
