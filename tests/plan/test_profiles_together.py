"""Requests of one model that are profiled together have the profiles that they have alone, of fewer traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_folders import HALF, Architecture

from runner.config.compose.resolve import resolve_with_layers
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.model.apart import apart
from runner.model.fake import fake_tensors
from runner.model.traced.kept import keeping_traces
from runner.plan.planners.problem import expected_profiles
from runner.profiling.model import example_microbatch, faked_profile, profile_model
from runner.profiling.together import ProfilesTogether

_MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.rest = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 36, 4)

    def forward(self, x):
        return self.rest(torch.relu(self.norm(self.first(x))).flatten(1))

class Narrow(Net):
    def forward(self, x):
        if x.shape[0] > 7:
            raise ValueError("eight are too many")
        return super().forward(x)

def data():
    return [(torch.randn(3, 8, 8), torch.randn(4)) for _ in range(16)]
"""
_NETS = ("model=custom", "data=custom", "data.target=nets:data", "loss=mse", "data.batch_size=32")
_ALL = ("hardware=a100_80gb", "parallelism=auto", "parallelism.ranks=4")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets.py").write_text(_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def llama(folder: Path, *words: str) -> list[RunConfig]:
    Architecture("LlamaConfig", "LlamaForCausalLM", HALF).save(folder / "llama")
    named = ("model=huggingface", f"model.pretrained={folder / 'llama'}", "data.batch_size=32")
    return expected(*named, *words)


def expected(*words: str) -> list[RunConfig]:
    config, _ = resolve_with_layers([*words, *_ALL])
    config.profile.refresh = True
    return expected_profiles(config, ())


@pytest.mark.costly
@pytest.mark.parametrize("words", [(), ("parallelism.sequence=true", "parallelism.sharding=null")])
def test_a_divided_model_has_the_same_profiles(place: Path, words: tuple[str, ...]) -> None:
    requests = llama(place, *words)
    together = ProfilesTogether(requests)
    assert [each.parallelism.tensor for each in requests] == [1, 1, 2, 2, 4, 4]
    for request in requests[1:3]:  # four do not divide two heads of keys and values
        assert together(request) == profile_model(request)


@pytest.mark.parametrize(("per_node", "degrees"), [(2, [1, 2]), (4, [1, 2, 4])])
def test_layers_are_divided_among_ranks_of_one_node(per_node: int, degrees: list[int], place: Path) -> None:
    """So that their sums never pass a slower network, whatever its speed is."""
    requests = llama(place, f"hardware.devices_per_node={per_node}", "hardware.network_bytes_per_second=1e9")
    assert sorted({each.parallelism.tensor for each in requests}) == degrees


@pytest.mark.costly
def test_a_traced_model_with_running_statistics_has_the_same_profiles() -> None:
    requests = expected(*_NETS, "model.target=nets:Net")
    together = ProfilesTogether(requests)
    for request in requests[:2]:
        assert together(request) == profile_model(request)


@pytest.mark.costly
def test_what_is_wrong_with_one_request_is_told_for_that_one() -> None:
    many, few = expected(*_NETS, "model.target=nets:Narrow", "data.batch_size=128")[:2]
    few.schedule.microbatches = 32
    together = ProfilesTogether([many, few])
    with pytest.raises(RequestError, match="must take what the data gives"):
        together(many)
    assert together(few) == profile_model(few)


@pytest.mark.costly
def test_each_way_to_divide_a_model_is_traced_once(place: Path) -> None:
    requests = llama(place)[:4]
    alone, kept = apart(_counted, requests, False), apart(_counted, requests, True)
    assert (alone, kept) == (8, 3)  # each divided one is compared with the whole, and has two modes


def _counted(requests: list[RunConfig], keeps: bool) -> int:
    """How many exports the profiles of requests take."""
    calls, export = [], torch.export.export

    def counting(*given: Any, **named: Any) -> Any:
        calls.append(1)
        return export(*given, **named)

    torch.export.export = counting
    if keeps:
        mode = fake_tensors()
        with keeping_traces():
            for request in requests:
                faked_profile(request, *example_microbatch(request), mode)
    else:
        for request in requests:
            faked_profile(request, *example_microbatch(request))
    return len(calls)
