"""Runs collective operations between ranks of this machine, checks their results and measures their speed.

Bus bandwidth is the algorithm's bandwidth times the share of the data that each rank must at least move, so that the
figure can be compared with the link's own bandwidth. Source: NCCL tests, doc/PERFORMANCE.md.

Run as a module, this file is one rank: ``python -m runner.launch.doctor.collectives STORE RANK RANKS DEVICE``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.links import links_file
from runner.launch.doctor.link_fit import fit_link
from runner.record import write_atomically

if TYPE_CHECKING:
    import torch

__all__ = ["RING", "measure_collectives", "start_together"]

SIZES = (*(8 << 2 * step for step in range(11)), 16 << 20)
"""The sizes in bytes that are timed, from 8 bytes to 16 MiB, each at most four times the one before."""

RING = "send and receive"
"""Each rank sends to the next one and receives from the one before."""
_ROUNDS = 15
_SECONDS = 120


def start_together(lines: Sequence[Sequence[str]], seconds: float) -> list[tuple[int, str, str]]:
    """Run the commands side by side and return status, standard output and standard error of each.

    Raises:
        TimeoutError: a command did not end in time; all of them are killed.
    """
    ranks = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for line in lines]
    try:
        said = [rank.communicate(timeout=seconds) for rank in ranks]
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{len(ranks)} ranks did not end within {seconds:g} s") from error
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdout, rank.stderr):
                if pipe is not None:
                    pipe.close()
    return [(rank.returncode, *words) for rank, words in zip(ranks, said, strict=True)]


def measure_collectives(num_ranks: int, device: str) -> dict[str, Any]:
    """Check and time the collectives over ``num_ranks`` ranks, and save the link's figures for ``hardware=auto``.

    Args:
        device: ``cpu`` (Gloo) or ``cuda`` (NCCL, one device for each rank).

    Returns:
        ``right`` (by collective), ``bus_bytes_per_second`` (for 16 MiB), ``seconds`` (by collective, of each of the
        ``sizes``), ``fits`` (by collective, see :class:`LinkFit`), and ``latency_seconds`` and ``bytes_per_second``
        of a message, from the fit of the ring of messages.

    Raises:
        RuntimeError: a rank failed; the message holds the last line of its error output.
        TimeoutError: a rank does not end.
    """
    with tempfile.TemporaryDirectory() as place:
        line = [sys.executable, "-m", "runner.launch.doctor.collectives", str(Path(place) / "store")]
        ended = start_together([[*line, str(rank), str(num_ranks), device] for rank in range(num_ranks)], _SECONDS)
    failed = [error for status, _, error in ended if status]
    if failed:
        raise RuntimeError((failed[0].strip().splitlines() or ["a rank died"])[-1])
    found: dict[str, Any] = json.loads(ended[0][1])
    if all(found["right"].values()):
        links_file().parent.mkdir(parents=True, exist_ok=True)
        kept = {"date": time.strftime("%Y-%m-%d"), "ranks": num_ranks, "device": device, **found}
        write_atomically(links_file(), json.dumps(kept, indent=1) + "\n")
    return found


def _rank(store: str, rank: int, num_ranks: int, device: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    right, seconds, bus, fits = {}, {}, {}, {}
    for name, (messages, share) in _collectives(num_ranks).items():
        verdict = torch.tensor([float(_runner(name, rank, num_ranks, device, SIZES[-1])())], device=device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        right[name] = bool(verdict.item())
        taken = [_median_seconds(_runner(name, rank, num_ranks, device, size), device) for size in SIZES]
        seconds[name], bus[name] = taken, SIZES[-1] * share / taken[-1]
        fits[name] = fit_link(list(zip(SIZES, taken, strict=True)), messages=messages, share=share).to_json()
    return {
        "right": right,
        "sizes": SIZES,
        "seconds": seconds,
        "bus_bytes_per_second": bus,
        "fits": fits,
        "latency_seconds": fits[RING]["latency_seconds"],
        "bytes_per_second": fits[RING]["bytes_per_second"],
    }


def _collectives(ranks: int) -> dict[str, tuple[int, float]]:
    """For each collective, as a ring does it, the messages that wait for one another, and a link's bytes per byte."""
    others, part = max(1, ranks - 1), (ranks - 1) / ranks
    return {
        "all_reduce": (2 * others, 2 * part),
        "all_gather": (others, part),
        "reduce_scatter": (others, part),
        "broadcast": (1, 1.0),
        RING: (1, 1.0),
    }


def _runner(name: str, rank: int, ranks: int, device: str, num_bytes: int) -> Callable[[], bool]:
    """Return a function that runs the collective once and says whether this rank received the right values."""
    import torch
    import torch.distributed as dist

    count = max(ranks, num_bytes // 4 // ranks * ranks)
    own = torch.full((count,), float(rank + 1), device=device)

    def all_reduce() -> bool:
        total = own.clone()
        dist.all_reduce(total)
        return _all_equal(total, ranks * (ranks + 1) / 2)

    def all_gather() -> bool:
        parts = [torch.empty(count // ranks, device=device) for _ in range(ranks)]
        dist.all_gather(parts, own[: count // ranks])
        return all(_all_equal(part, float(number + 1)) for number, part in enumerate(parts))

    def reduce_scatter() -> bool:
        part = torch.empty(count // ranks, device=device)
        dist.reduce_scatter_tensor(part, own)
        return _all_equal(part, ranks * (ranks + 1) / 2)

    def broadcast() -> bool:
        sent = own.clone()
        dist.broadcast(sent, src=ranks - 1)
        return _all_equal(sent, float(ranks))

    def send_and_receive() -> bool:
        """Send to the next rank of the ring and receive from the previous one."""
        taken = torch.empty_like(own)
        both = [dist.isend(own, (rank + 1) % ranks), dist.irecv(taken, (rank - 1) % ranks)]
        for one in both:
            if one is not None:
                one.wait()
        return _all_equal(taken, float((rank - 1) % ranks + 1))

    functions = {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "broadcast": broadcast,
        RING: send_and_receive,
    }
    return functions[name]


def _all_equal(values: torch.Tensor, wanted: float) -> bool:
    return bool((values == wanted).all())


def _median_seconds(run: Callable[[], bool], device: str) -> float:
    import torch
    import torch.distributed as dist

    taken = []
    run()  # the first one opens connections
    for _ in range(_ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


if __name__ == "__main__":
    measured = _rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    if sys.argv[2] == "0":
        print(json.dumps(measured))
    sys.stdout.flush()
    os._exit(0)  # skips the interpreter's teardown, in which torch's threads may abort
