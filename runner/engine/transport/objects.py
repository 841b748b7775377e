"""Plain values and tensors between ranks, without pickle: a value's structure as JSON, its tensors as their bytes.

torch's own collectives of objects pickle them, so that whoever could send a rank a message could run code in it.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from runner.engine.transport.base import Channel, Handle, Transport
from runner.model.boundary import flatten, unflatten

__all__ = [
    "all_gather_values",
    "broadcast_value",
    "gather_values",
    "packed",
    "receive_value",
    "send_value",
    "unpacked",
]

Value = TypeVar("Value")
_LENGTH_BYTES = 8


def packed(value: Any) -> Tensor:
    """``value`` as bytes on the CPU: [the head's length in 8 bytes, the head as JSON, the tensors' elements].

    Args:
        value: tensors, and containers of tensors and of plain values. Each tensor is sent without the rest of its
            storage; the order of its axes in memory stays, because products of matrices are rounded by it.

    Raises:
        TypeError: it holds something else.
    """
    try:
        tensors, structure = flatten(value)
    except TypeError as error:
        raise TypeError(str(error).replace("between layers", "between ranks")) from None
    orders = [_axes_in_memory(tensor) for tensor in tensors]
    tensors = [tensor.permute(order) for tensor, order in zip(tensors, orders, strict=True)]
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    kinds = [(name, list(each.shape), order) for name, each, order in zip(names, tensors, orders, strict=True)]
    head = json.dumps([kinds, structure]).encode()
    parts = [len(head).to_bytes(_LENGTH_BYTES, "little") + head]
    plain = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]
    return torch.cat([*plain, *(_bytes_of(tensor) for tensor in tensors)])


def unpacked(data: Tensor) -> Any:
    """What was :func:`packed`; its tensors are copies on the CPU."""
    length = int.from_bytes(bytes(data[:_LENGTH_BYTES].tolist()), "little")
    at = _LENGTH_BYTES + length
    kinds, structure = json.loads(data[_LENGTH_BYTES:at].numpy().tobytes())
    tensors = []
    for name, shape, order in kinds:
        dtype: torch.dtype = getattr(torch, name)
        count = math.prod(shape) * dtype.itemsize
        stored = data[at : at + count].clone().view(dtype).view(shape)
        tensors.append(stored.permute(sorted(range(len(order)), key=order.__getitem__)))
        at += count
    return unflatten(tensors, structure)


def send_value(value: Any, transport: Transport, peer: int, channel: Channel) -> list[tuple[Handle, Tensor]]:
    """Start to send what :func:`packed` takes, without a copy of it; return its messages, which must stay alive."""
    tensors, structure = flatten(value)
    orders = [_axes_in_memory(tensor) for tensor in tensors]
    kinds = [
        (str(each.dtype).removeprefix("torch."), list(each.permute(order).shape), order, each.device.type)
        for each, order in zip(tensors, orders, strict=True)
    ]
    sent = transport.send_bytes(json.dumps([kinds, structure]).encode(), peer, channel)
    for tensor, order in zip(tensors, orders, strict=True):
        if tensor.numel():
            there = tensor.detach().permute(order).to(transport.device).contiguous().reshape(-1).view(torch.uint8)
            sent.append((transport.send(there, peer, channel), there))
    return sent


def receive_value(transport: Transport, peer: int, channel: Channel) -> Any:
    """What :func:`send_value` has sent; a tensor of the device is on this rank's, one of the CPU on the CPU."""
    kinds, structure = json.loads(transport.receive_bytes(peer, channel))
    tensors = []
    for name, shape, order, device in kinds:
        dtype: torch.dtype = getattr(torch, name)
        received = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=transport.device)
        if received.numel():
            transport.receive(received, peer, channel).wait()
        own = received.view(dtype).view(shape).permute(sorted(range(len(order)), key=order.__getitem__))
        tensors.append(own if device == transport.device.type else own.to(device))
    return unflatten(tensors, structure)


def broadcast_value(value: Value, src: int) -> Value:
    """The ``value`` of rank ``src``, on every rank; what other ranks pass is not looked at."""
    data = packed(value) if dist.get_rank() == src else torch.empty(0, dtype=torch.uint8)
    length = _on_device(torch.tensor([data.numel()]))
    dist.broadcast(length, src)
    sent = _on_device(data if dist.get_rank() == src else torch.empty(int(length), dtype=torch.uint8))
    dist.broadcast(sent, src)
    received: Value = unpacked(sent.cpu())
    return received


def all_gather_values(value: Value) -> list[Value]:
    """Every rank's ``value``, ordered by rank, on every rank."""
    own, lengths = _padded(value)
    parts = [torch.empty_like(own) for _ in lengths]
    dist.all_gather(parts, own)
    return [unpacked(part[:length].cpu()) for part, length in zip(parts, lengths, strict=True)]


def gather_values(value: Value) -> list[Value] | None:
    """Every rank's ``value``, ordered by rank, on rank 0; None on other ranks."""
    own, lengths = _padded(value)
    parts = [torch.empty_like(own) for _ in lengths] if dist.get_rank() == 0 else None
    dist.gather(own, parts, dst=0)
    if parts is None:
        return None
    return [unpacked(part[:length].cpu()) for part, length in zip(parts, lengths, strict=True)]


def _padded(value: Any) -> tuple[Tensor, list[int]]:
    """The packed value, as long as the longest of all ranks, and the lengths of all."""
    data = packed(value)
    lengths = [_on_device(torch.zeros(1, dtype=torch.int64)) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, _on_device(torch.tensor([data.numel()])))
    counts = [int(length) for length in lengths]
    return _on_device(torch.nn.functional.pad(data, (0, max(counts) - data.numel()))), counts


def _axes_in_memory(tensor: Tensor) -> list[int]:
    """The axes of a tensor from that with the longest stride to that with the shortest one."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _on_device(tensor: Tensor) -> Tensor:
    """The tensor where this group's messages begin."""
    return tensor.cuda() if dist.get_backend() == "nccl" else tensor
