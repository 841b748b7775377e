"""Folders of transformers: a pipeline that starts from one trains as a plain loop from ``from_pretrained``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import sampled
from layouts import make_engine, part_of
from pretrained_folders import ARCHITECTURES, SIZES, Architecture
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from runner.config.schema import DataConfig, LossConfig, ModelConfig, ParallelismConfig, RunConfig, TrainerConfig
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.model.check_pretrained import pretrained_problems
from runner.model.layers import LayerSource, build_stage
from runner.model.live_tracker import LiveTracker
from runner.model.load import load_model
from runner.model.pretrained.stored import StoredTensor
from runner.model.ties import find_ties, with_all_names

STEPS, SAMPLES, COUNT = 4, 4, 2
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
Batch = tuple[Any, torch.Tensor]


class Data(torch.utils.data.Dataset[Any]):
    def __init__(self, name: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pair = ARCHITECTURES[name].inputs(8, generator), ARCHITECTURES[name].targets(8, generator)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.pair
        given = tuple(each[index] for each in inputs) if isinstance(inputs, tuple) else inputs[index]
        return given, targets[index]


def data(name: str) -> Data:
    return Data(name)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def request(name: str, folder: Path | str, *, pipeline: int = 2, freeze: Sequence[str] = (), **model: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(
            name="huggingface", target="runner.zoo.huggingface:build", config_file="config.json",
            pretrained=str(folder), **model,
        ),
        data=DataConfig(target="test_pretrained_folders:data", kwargs={"name": name}),
        loss=LossConfig(target="test_pretrained_folders:cross_entropy"),
        parallelism=ParallelismConfig(pipeline=pipeline),
        trainer=TrainerConfig(freeze=list(freeze)),
    )  # fmt: skip


def batches_of(case: Architecture) -> list[Batch]:
    generators = [torch.Generator().manual_seed(seed) for seed in range(STEPS)]
    return [(case.inputs(SAMPLES, each), case.targets(SAMPLES, each)) for each in generators]


def plain_loop(case: Architecture, model: Any, frozen: Sequence[str] = ()) -> tuple[list[float], Any]:
    """Losses and the trained model of a plain loop; names that begin with one of ``frozen`` are not trained."""
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)) if frozen else True)
    optimizer = sgd([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses = []
    for inputs, targets in batches_of(case):
        model.zero_grad()
        total, weight = 0.0, 0
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        for *part, target in zip(*(each.tensor_split(COUNT) for each in (*given, targets)), strict=True):
            loss = cross_entropy(case.logits(model, tuple(part)), target) * len(target)
            torch.autograd.backward(loss)
            total, weight = total + loss.item(), weight + len(target)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= weight
        optimizer.step()
        losses.append(total / weight)
    return losses, model


def pipeline_of(
    case: Architecture, chains: Sequence[list[LayerSource]], schedule: str = "1f1b"
) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    """Losses, weights, and elements of gradients per rank, of a pipeline with a rank for each chain of layers."""

    def run(transport: ThreadTransport) -> tuple[list[float], dict[str, torch.Tensor], int]:
        engine = make_engine(
            chains[transport.rank], cross_entropy, transport, schedule=schedule, pipeline=len(chains), data=1,
            count=COUNT, optimizer=sgd,
        )  # fmt: skip
        losses = [
            f.loss for batch in batches_of(case) for f in engine.submit(part_of(batch, transport, len(chains), 1))
        ]
        engine.drain()
        state = {k: v for stage in engine.stages.values() for k, v in stage.global_state().items()}
        trained = sum(p.numel() for stage in engine.stages.values() for p in stage.parameters() if p.grad is not None)
        return losses, state, trained

    results = run_ranks(len(chains), run)
    weights = with_all_names({k: v for _, state, _ in results for k, v in state.items()}, find_ties(chains[0]))
    return results[0][0], weights, [trained for _, _, trained in results]


def check_equal(
    found: tuple[list[float], dict[str, torch.Tensor]], losses: list[float], model: Any, *, exact: bool
) -> None:
    state = model.state_dict()
    assert set(found[1]) == set(state)
    if exact:
        assert found[0] == losses
        assert [name for name in state if not torch.equal(found[1][name], state[name])] == []
        return
    assert found[0] == pytest.approx(losses, rel=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {{}}".format)


def start_of(chain: Sequence[LayerSource]) -> dict[str, torch.Tensor]:
    return with_all_names(build_stage(chain, 0, len(chain) - 1).global_state(), find_ties(chain))


@torch.no_grad()
def logits_of(chain: Sequence[LayerSource], stages: int, inputs: Any) -> torch.Tensor:
    """The logits of stages of about equally many layers, one after the other."""
    ends = [len(chain) * stage // stages for stage in range(stages + 1)]
    value = inputs
    for first, end in pairwise(ends):
        stage = build_stage(chain, first, end - 1).eval()
        value = stage(value)
        stage.train()
    return torch.as_tensor(value)


def equal_from(
    name: str, folder: Path, pipeline: int, schedule: str = "1f1b", frozen: Sequence[str] = ()
) -> tuple[list[LayerSource], list[int]]:
    """Check a pipeline against a plain loop; returns its layers, and the elements of each rank's gradients."""
    case = ARCHITECTURES[name]
    config = request(name, folder, pipeline=pipeline, freeze=[f"{each}*" for each in frozen])
    assert pretrained_problems(config) == []
    whole = load_model(config, filled=True).layers
    more = [load_model(config, filled=True).layers if find_ties(whole) else whole for _ in range(pipeline - 1)]
    chains = [whole, *more]  # ranks have their own copies of tied weights
    expected, model = case.make().state_dict(), case.open(folder).eval()
    assert all(torch.equal(value, expected[name]) for name, value in start_of(whole).items())
    inputs = batches_of(case)[0][0]
    with torch.no_grad():
        assert torch.equal(logits_of(whole, pipeline, inputs), case.logits(model, inputs))
    losses, weights, trained = pipeline_of(case, chains, schedule)
    # A trace has other kernels in the backward.
    check_equal((losses, weights), *plain_loop(case, model, frozen), exact=pipeline == 1)
    state = with_all_names(weights, find_ties(whole))
    kept = [name for name in state if frozen and name.startswith(tuple(frozen))]
    assert all(torch.equal(state[name], expected[name]) for name in kept)
    return whole, trained


@pytest.mark.costly
def test_two_stages_read_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends have the tied weight, and each reads the tensors of its own layers alone, once."""
    layers, _ = equal_from("llama_tied", ARCHITECTURES["llama_tied"].save(tmp_path / "llama"), 2)
    read: list[str] = []
    own = StoredTensor.read

    def noted(stored: StoredTensor) -> torch.Tensor:
        read.append(stored.name)
        return own(stored)

    monkeypatch.setattr(StoredTensor, "read", noted)
    for first, last in ((0, len(layers) // 2 - 1), (len(layers) // 2, len(layers) - 1)):
        read.clear()
        stage = build_stage(layers, first, last)
        assert sorted(read) == sorted(stage.global_state())


def test_a_file_beside_its_configuration_is_told_to_be_read_with_it(tmp_path: Path) -> None:
    """A file names no sizes: the advice for each tensor that is missing was to leave it fresh."""
    folder = ARCHITECTURES["llama"].save(tmp_path / "llama")
    config = request("llama", sorted(folder.glob("*.safetensors"))[0])
    model = replace(config.model, kwargs={"model_type": "gpt2", **SIZES})
    (problem,) = pretrained_problems(replace(config, model=model))
    assert problem.fix == f"model.pretrained={folder}"
    (folder / "config.json").unlink()
    assert len(pretrained_problems(replace(config, model=model))) > 1


MATRIX = [(name, pipeline) for name in ARCHITECTURES for pipeline in (1, 2, 4)]


@pytest.mark.parametrize("case", sampled(MATRIX, ("mixtral", 1), ("vit", 1)), ids=lambda case: f"{case[0]}-{case[1]}")
def test_every_architecture(case: tuple[str, int], tmp_path: Path) -> None:
    """The logits are those of transformers' own model bit for bit, and four steps those of a plain loop.

    The sample has experts that are joined when they are read, and images.
    """
    name, pipeline = case
    equal_from(name, ARCHITECTURES[name].save(tmp_path / name), pipeline)


@pytest.mark.costly
def test_frozen_first_layers(tmp_path: Path) -> None:
    """Frozen weights keep their bits, and a stage of them alone has no gradient."""
    folder = ARCHITECTURES["llama"].save(tmp_path / "llama")
    frozen = ("model.embed_tokens", "model.layers")  # the first stage; the second one has the norm and the head
    _, trained = equal_from("llama", folder, 2, frozen=frozen)
    assert trained[0] == 0
    assert trained[1] > 0


class _Allocated(LiveTracker):  # type: ignore[no-untyped-call]
    """Counts what operators allocate: no tensor without memory, and none over the memory map of a file."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        self._seen.update(each.untyped_storage() for each in tensors)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def watch(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu":
            super().watch(tensor)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2"])
def test_a_rank_that_divides_layers_needs_no_more_memory_to_read_a_folder(name: str, tmp_path: Path) -> None:
    """Counted from the request to the filled layers, with the model that is made before it is divided."""
    folder = ARCHITECTURES[name].save(tmp_path / name)
    peaks, held = {}, {}
    for degree in (1, 2):
        config = request(name, folder)
        config.parallelism.tensor = degree
        with _Allocated() as counted:
            layers = load_model(config, filled=True, shard=0 if degree > 1 else None).layers
            stage = build_stage(layers, 0, len(layers) - 1)
        peaks[degree], held[degree] = counted.peak, sum(each.nbytes for each in stage.parameters())
    assert peaks[2] <= peaks[1]
    assert held[2] < 0.7 * held[1]
