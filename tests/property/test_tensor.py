"""Whole requests whose layers ranks divide give what one process gives, in every layout, and need what is planned."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import tensor_models
import torch
from plain_compressors import Plain, halves, largest, signs
from plain_compressors import train as train_plainly
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from whole_runs import Run, peaks, require_peaks, train

from runner.checkpoint.file import read_checkpoint
from runner.checkpoint.parts import DividedTensor, read_parts
from runner.cli.main import main
from runner.config.compose.resolve import resolve
from runner.engine.update.gradients import StageGradients
from runner.errors import RequestError, RunFailedError
from runner.launch.run.prepare import prepare
from runner.launch.run.resume import with_checkpoint

STEPS = 3
HEAD_NORMS = {"*.head_norm": "partial"}
_RULES = tensor_models.RULES | HEAD_NORMS
_SHARDING = "parallelism.sharding={" + ",".join(f"{name}:'{way}'" for name, way in _RULES.items()) + "}"
SEQUENCE = "parallelism.sequence=true"
_COMMON = (
    "model=custom", "model.target=tensor_models:build", "data=custom", "data.target=tensor_models:data", "loss=custom",
    "loss.target=tensor_models:loss", "data.batch_size=8", "data.shuffle=false",
    "optimizer.lr=0.01", "optimizer.eps=1e-3", "optimizer.weight_decay=0.1", "trainer.grad_clip_norm=0.5", "device=cpu",
    "hardware=laptop_cpu", "logger=none", "trainer.progress=false", "launcher.watchdog_seconds=null",
    f"trainer.max_steps={STEPS}", "seed=3",
)  # fmt: skip


_STANDING = ("optimizer.lr=1e-30", "optimizer.weight_decay=0", "trainer.max_steps=1")
"""A step that changes no weight."""


def run(folder: Path, *overrides: str) -> Run:
    folder.mkdir(exist_ok=True)
    return train(resolve([*_COMMON, *overrides]), folder)


def divided(folder: Path, *overrides: str) -> Run:
    return run(folder, _SHARDING, *overrides)


def plain(
    start: dict[str, Tensor], *, steps: int = STEPS, batch: int = 8, tied: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and weights after the steps, of a plain loop over whole batches that begins with the given weights."""
    model = tensor_models.build(tied=tied).to(next(iter(start.values())).dtype)
    model.load_state_dict(start | ({"head.weight": start["table.weight"]} if tied else {}))
    losses = _trained(model, steps, batch)
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def _trained(
    model: nn.Module,
    steps: int = STEPS,
    batch: int = 8,
    optimizer: Any = None,
    norm: float = 0.5,
    norms: list[float] | None = None,
    skipped: int = 0,
) -> list[float]:
    """Losses of a plain loop; to ``norms`` it adds those of all gradients before they are clipped.

    A step may be skipped: its gradients change nothing.
    """
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1, eps=1e-3)
    samples, losses = tensor_models.data(), []
    for step in range(steps):
        places = [(step * batch + at) % len(samples) for at in range(batch)]
        inputs, targets = (torch.stack([samples[place][part] for place in places]) for part in (0, 1))
        loss = tensor_models.loss(model(inputs), targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        found = torch.nn.utils.clip_grad_norm_(trained, norm)
        if step + 1 != skipped:
            optimizer.step()
        if norms is not None:
            norms.append(float(found))
        losses.append(float(loss.detach()))
    return losses


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "weights.safetensors")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The initial weights: those that the model function makes in one process, before a step."""
    folder = tmp_path_factory.mktemp("start")
    run(folder, *_STANDING)
    return weights_of(folder)


def require_close(own: Sequence[float], expected: Sequence[float]) -> None:
    torch.testing.assert_close(torch.tensor(own), torch.tensor(expected), rtol=2e-6, atol=2e-6)


def require_same_weights(
    own: dict[str, Tensor], expected: dict[str, Tensor], names: Sequence[str] | None = None
) -> None:
    for name in names or expected:
        torch.testing.assert_close(own[name], expected[name], rtol=0, atol=3e-5, msg=name)


LAYOUTS = {
    "two parts": ("parallelism.tensor=2",),
    "four parts": ("parallelism.tensor=4",),
    "three dimensions": ("parallelism=three_d", "schedule.microbatches=2"),
    "split backwards": ("parallelism=three_d", "schedule=zb_h1", "schedule.microbatches=4"),
    "zb_v": ("parallelism=three_d", "schedule=zb_v", "schedule.microbatches=4"),
    "interleaved": ("parallelism=three_d", "schedule=interleaved_1f1b", "schedule.microbatches=4"),
    "twins": ("parallelism=three_d", "schedule=chimera", "schedule.microbatches=4"),
    "recomputed": ("parallelism.tensor=2", "schedule.microbatches=2", "activation_checkpoint=full"),
    "offloaded": ("parallelism.tensor=2", "offload=activations_async"),
    "states are shared out": ("parallelism=three_d", "schedule.microbatches=2", "zero=1"),
    "tokens are divided": (SEQUENCE, "parallelism.tensor=2"),
    "tokens are divided in three dimensions": (
        SEQUENCE,
        "parallelism=three_d",
        "schedule=zb_h1",
        "schedule.microbatches=2",
    ),
    "an average is of parts": ("parallelism.tensor=2", "trainer.ema_decay=0.9"),
}


@pytest.mark.costly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_divided_model_gives_what_one_process_gives(layout: str, start: dict[str, Tensor], tmp_path: Path) -> None:
    made = divided(tmp_path, *LAYOUTS[layout])
    losses, weights = plain(start)
    require_close(made.losses, losses)
    if "ema" not in "".join(LAYOUTS[layout]):
        require_same_weights(weights_of(tmp_path), weights)
    require_peaks(made)


@pytest.mark.costly
def test_gradients_are_those_of_one_process(start: dict[str, Tensor], tmp_path: Path) -> None:
    """Without clipping, which would hide a common factor: whole ones by value, those of parts by their squares."""
    layout = ("parallelism.tensor=2", "parallelism.pipeline=2", "schedule.microbatches=2", "trainer.max_steps=1")
    made = divided(tmp_path, *layout, "trainer.grad_clip_norm=null")
    model = tensor_models.build()
    model.load_state_dict(start)
    samples = [tensor_models.data()[at] for at in range(8)]
    inputs, targets = (torch.stack([sample[part] for sample in samples]) for part in (0, 1))
    torch.autograd.backward(tensor_models.loss(model(inputs), targets))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found = made.gradients[0][name]
        assert len(found) == 2, name
        if found[0].shape == parameter.shape:
            for each in found:
                torch.testing.assert_close(each, parameter.grad, rtol=1e-5, atol=1e-6)
        squares = sum(float(each.square().sum()) for each in found) / (2 if found[0].shape == parameter.shape else 1)
        assert squares == pytest.approx(float(parameter.grad.square().sum()), rel=1e-4, abs=1e-9), name


def clipped(folder: Path, ranks: int) -> Run:
    """A run with SGD, which a wrong factor moves elsewhere."""
    plainly = ("optimizer=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.lr=1")
    common = [each for each in _COMMON if not each.startswith(("optimizer.", "trainer.grad"))]
    parts = (_SHARDING, f"parallelism.tensor={ranks}") if ranks > 1 else ()
    return train(resolve([*common, *plainly, "trainer.grad_clip_norm=0.1", *parts]), _made(folder))


@pytest.mark.costly
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_are_clipped_by_the_norm_of_one_process(ranks: int, start: dict[str, Tensor], tmp_path: Path) -> None:
    """Every rank is told that norm."""
    made = clipped(tmp_path / "parts", ranks)
    model, norms = tensor_models.build(), list[float]()
    model.load_state_dict(start)
    losses = _trained(model, optimizer=torch.optim.SGD(model.parameters(), lr=1), norm=0.1, norms=norms)
    assert min(norms) > 0.2
    assert made.norms == [pytest.approx([norm] * ranks, rel=1e-6) for norm in norms]
    require_close(made.losses, losses)
    for name, value in weights_of(tmp_path / "parts").items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=2e-6, msg=name)


@pytest.mark.costly
def test_a_norm_that_counts_whole_weights_on_each_rank_is_told(
    start: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a norm is too large by more than is allowed above, so that losses leave those of one process."""

    def count_all(gradients: StageGradients, tags: object) -> StageGradients:
        gradients.counted = frozenset(gradients.names)
        return gradients

    monkeypatch.setattr("runner.engine.update.sets._counting", count_all)
    made = clipped(tmp_path / "parts", 2)
    model, norms = tensor_models.build(), list[float]()
    model.load_state_dict(start)
    losses = _trained(model, optimizer=torch.optim.SGD(model.parameters(), lr=1), norm=0.1, norms=norms)
    assert all(told is not None and told > 1.01 * norms[0] for told in made.norms[0])
    assert made.losses[0] == pytest.approx(losses[0], rel=2e-6)
    assert made.losses[1] != pytest.approx(losses[1], rel=1e-4)


@pytest.mark.costly
@pytest.mark.parametrize("sequence", ["parallelism.sequence=false", SEQUENCE])
def test_the_work_of_a_step_is_that_of_the_model(sequence: str) -> None:
    """Up to the head, whose 13 tokens are padded to 14; so the MFU of two ranks is not half of what it is."""
    whole, parts = (
        prepare(resolve([*_COMMON, *words]), place_is_made=True).work.flops
        for words in ((), (_SHARDING, "parallelism.tensor=2", sequence))
    )
    assert 1 <= parts / whole < 1 + 1 / 14


@pytest.mark.costly
@pytest.mark.parametrize("layout", ["parallelism.pipeline=1", "parallelism.pipeline=2"])
def test_what_no_rule_names_is_found_in_the_operators(layout: str, start: dict[str, Tensor], tmp_path: Path) -> None:
    made = run(tmp_path, layout, "parallelism.tensor=2")
    losses, weights = plain(start)
    require_close(made.losses, losses)
    require_same_weights(weights_of(tmp_path), weights)
    assert made.plan.profile.parameters_elsewhere > made.plan.profile.num_parameters // 3
    assert made.plan.profile.num_parameters == sum(value.numel() for value in start.values())


_HUGGING_FACE = (
    "model.target=runner.zoo.huggingface:build", "model.kwargs.vocab_size=13", "model.kwargs.hidden_size=16",
    "model.kwargs.num_attention_heads=4", "model.kwargs.num_hidden_layers=2", "model.kwargs.max_position_embeddings=8",
    "loss.target=runner.zoo.losses:cross_entropy", "model.kwargs.task=causal",
)  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", ("+model.kwargs.intermediate_size=24", "+model.kwargs.num_key_value_heads=2")),  # by its own plan
        ("gpt2", ("+model.kwargs.attn_pdrop=0",)),  # by its operators, with dropout of whole values
    ],
)
def test_a_model_of_transformers_is_divided_as_it_is(kind: str, more: tuple[str, ...], tmp_path: Path) -> None:
    model = (*_HUGGING_FACE, f"model.kwargs.model_type={kind}", *more)
    expected = run(tmp_path / "whole", *model)
    made = run(tmp_path / "parts", *model, "parallelism.tensor=2", "parallelism.pipeline=2")
    require_close(made.losses, expected.losses)
    require_same_weights(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"))


@pytest.mark.costly
@pytest.mark.parametrize("layout", ["parallelism.pipeline=1", "schedule=chimera"])
@pytest.mark.parametrize("optimizer", ["lamb", "lars"])
def test_norms_are_of_whole_weights(optimizer: str, layout: str, tmp_path: Path) -> None:
    """Of the biases, too, with LAMB; with copies of the stages that are updated by themselves."""
    own = (
        ("optimizer.lr=0.1", "optimizer.eps=1e-3")
        if optimizer == "lamb"
        else ("optimizer.lr=1", "optimizer.momentum=0.9")
    )
    named = (f"optimizer={optimizer}", *own, "schedule.microbatches=2")
    common = [each for each in _COMMON if not each.startswith(("optimizer.lr", "optimizer.eps"))]
    ranks = ("parallelism.pipeline=2", layout) if layout.startswith("schedule") else (layout,)
    expected = train(resolve([*common, *named]), _made(tmp_path / "whole"))
    made = train(resolve([*common, *named, _SHARDING, "parallelism.tensor=4", *ranks]), _made(tmp_path / "parts"))
    require_close(made.losses, expected.losses)
    require_same_weights(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"))
    assert made.record.bytes_moved["tensor"] == made.plan.tensor_bytes_sent


@pytest.mark.costly
@pytest.mark.parametrize("layout", [("parallelism.tensor=4",), ("parallelism.tensor=2", "parallelism.pipeline=2")])
def test_matrices_are_made_orthogonal_whole(layout: tuple[str, ...], tmp_path: Path) -> None:
    """Muon rounds to 16 bits what it makes orthogonal; another rounding of one element there is as large as that."""
    named = ("optimizer=muon", "optimizer.momentum=0.9", "schedule.microbatches=2", "optimizer.lr=0.01")
    common = [each for each in _COMMON if not each.startswith("optimizer.lr")]
    expected = train(resolve([*common, *named]), _made(tmp_path / "whole"))
    made = train(resolve([*common, *named, _SHARDING, *layout]), _made(tmp_path / "parts"))
    torch.testing.assert_close(torch.tensor(made.losses), torch.tensor(expected.losses), rtol=1e-4, atol=0)
    whole = weights_of(tmp_path / "whole")
    for name, value in weights_of(tmp_path / "parts").items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=5e-4, msg=name)
    assert made.record.bytes_moved["tensor"] == made.plan.tensor_bytes_sent
    require_peaks(made)


def _by_parts(plain: Plain, ranks: int) -> Plain:
    """A compressor of each part of a weight by itself; ``kept`` has the weight's way, and what is kept of each part."""

    def parts(tensor: Tensor, way: str) -> list[Tensor]:
        if way == "packed_column:3":
            packed = tensor.view(3, ranks, -1, *tensor.shape[1:])
            return [packed[:, at].flatten(0, 1) for at in range(ranks)]
        if way in ("embedding", "column_gathered"):
            rows = -(-len(tensor) // ranks)
            padded = functional.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, ranks * rows - len(tensor)))
            return list(padded.chunk(ranks))
        return list(tensor.chunk(ranks, 1 if way == "row" else 0))

    def join(each: list[Tensor], way: str, like: Tensor) -> Tensor:
        if way == "packed_column:3":
            return torch.stack([part.view(3, -1, *part.shape[1:]) for part in each], 1).flatten(0, 2)
        return torch.cat(each, 1 if way == "row" else 0)[: len(like)]

    def by_parts(tensors: Sequence[Tensor], kept: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
        way = kept["way"]
        if way is None:
            return plain(tensors, kept)
        cut = [parts(tensor, way) for tensor in tensors]
        made = [plain([row[at] for row in cut], kept) for at in range(ranks)]
        total = join([sums for sums, _ in made], way, tensors[0])
        return total, [join([sent[at] for _, sent in made], way, each) for at, each in enumerate(tensors)]

    return by_parts


def _way_of(name: str) -> str | None:
    module, _, kind = name.rpartition(".")
    way = next((way for pattern, way in tensor_models.RULES.items() if fnmatch(module, pattern)), None)
    return None if way == "row" and kind == "bias" else way


@pytest.mark.costly
@pytest.mark.parametrize(
    ("compressor", "plain_one", "steps"),
    [
        (("compression=fp16", "compression.error_feedback=false"), halves(torch.float16), STEPS),
        (("compression=topk", "compression.density=0.25"), largest(0.25), STEPS),
        (("compression=signsgd",), signs(vote=False), 1),  # then rounding has decided signs of gradients that are zero
    ],
)
def test_each_part_of_a_gradient_is_compressed_by_itself(
    compressor: tuple[str, ...], plain_one: Plain, steps: int, start: dict[str, Tensor], tmp_path: Path
) -> None:
    named = (
        *compressor,
        "parallelism.data=2",
        "parallelism.tensor=2",
        "trainer.grad_clip_norm=null",
        f"trainer.max_steps={steps}",
    )
    whole, first, second = tmp_path / "whole", tmp_path / "first", tmp_path / "second"
    made = divided(whole, *named)
    model = tensor_models.build()
    model.load_state_dict(start)
    samples = [tensor_models.data()[at] for at in range(8 * steps)]
    inputs, targets = (torch.stack([sample[part] for sample in samples]).chunk(steps) for part in (0, 1))
    expected = train_plainly(
        model,
        lambda output, target: tensor_models.loss(output, target) * len(target),
        list(zip(inputs, targets, strict=True)),
        _by_parts(plain_one, 2),
        replicas=2,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=0.01, weight_decay=0.1, eps=1e-3),
        feedback="false" not in str(compressor),
        kept={at: {"way": _way_of(name)} for at, (name, _) in enumerate(model.named_parameters())},
    )
    of_keys = [name for name in expected if name.endswith("three.bias")]  # they have no gradient but rounding
    require_same_weights(weights_of(whole), expected, [name for name in expected if steps > 1 or name not in of_keys])
    assert made.record.bytes_moved["weight_gradients"] == made.plan.gradient_bytes_sent
    assert made.record.bytes_moved["tensor"] == made.plan.tensor_bytes_sent
    if "topk" in compressor[0]:  # what is left over goes on
        divided(first, *named, "trainer.max_steps=2")
        divided(second, *named, f"resume={first}/checkpoints/step-2.ckpt")
        assert all(torch.equal(value, weights_of(whole)[name]) for name, value in weights_of(second).items())


_ADAPTED = ("three", "out", "gate", "down", "head")
_ADAPTER = ("adapter=lora", "adapter.rank=3", "adapter.alpha=6", f"adapter.targets=[{','.join(_ADAPTED)}]")


@pytest.mark.costly
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((_SHARDING, "parallelism.tensor=4"), marks=pytest.mark.full),
        (_SHARDING, "parallelism=three_d", "schedule=zb_h1", "schedule.microbatches=2"),
        (_SHARDING, "parallelism.tensor=2", SEQUENCE),
        ("parallelism.tensor=2", "parallelism.pipeline=2"),  # what is divided is found
    ],
)
def test_adapters_are_divided_with_their_weights(layout: tuple[str, ...], tmp_path: Path) -> None:
    """PEFT's own loop is the reference. Frozen weights stay, and gradients and states are the adapters' alone."""
    import peft

    run(tmp_path / "start", *_ADAPTER, *_STANDING)
    first = weights_of(tmp_path / "start")
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=list(_ADAPTED))
    model = peft.get_peft_model(tensor_models.build(), settings)
    model.load_state_dict({f"base_model.model.{name}": value for name, value in first.items()})
    losses = _trained(model)
    made = run(tmp_path / "parts", *_ADAPTER, *layout)
    require_close(made.losses, losses)
    found = weights_of(tmp_path / "parts")
    require_same_weights(
        found, {name.removeprefix("base_model.model."): value for name, value in model.state_dict().items()}
    )
    assert [name for name, value in found.items() if torch.equal(value, first[name])] == [
        name for name in found if ".lora_" not in name
    ]
    assert made.record.bytes_moved["tensor"] == made.plan.tensor_bytes_sent
    require_peaks(made, 0.99 if _SHARDING in layout else 0.98)


@pytest.mark.costly
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters_are_exported_whole(tmp_path: Path) -> None:
    run(tmp_path / "whole", *_ADAPTER)
    divided(tmp_path / "parts", *_ADAPTER, "parallelism.tensor=2", SEQUENCE)
    folders = [exported(tmp_path / name, f"{name}_peft", "--format", "peft") for name in ("whole", "parts")]
    whole, parts = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    assert len(whole) == 2 * (4 * (len(_ADAPTED) - 1) + 1)
    assert set(parts) == set(whole)
    require_same_weights(parts, whole)
    assert all(value.abs().max() > 1e-3 for value in whole.values())
    first, second = [(folder / "adapter_config.json").read_bytes() for folder in folders]
    assert first == second


@pytest.mark.costly
def test_adapters_drop_what_one_process_drops(tmp_path: Path) -> None:
    """Where they read what all ranks have."""
    adapter = ("adapter=lora", "adapter.targets=[three,gate,head]", "adapter.dropout=0.3")
    expected = run(tmp_path / "whole", *adapter)
    made = divided(tmp_path / "parts", *adapter, "parallelism.tensor=2")
    require_close(made.losses, expected.losses)
    require_same_weights(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.costly
@pytest.mark.parametrize("unnamed", ["", "table", "head"])
def test_tied_weights_are_divided_once(unnamed: str, tmp_path: Path) -> None:
    """Also where rules name but one of the modules that hold the weight."""
    first, second = tmp_path / "first", tmp_path / "second"
    run(first, "model.kwargs.tied=true", *_STANDING)
    sharding = ",".join(f"{name}:'{way}'" for name, way in _RULES.items() if name != unnamed)
    layout = (f"parallelism.sharding={{{sharding}}}", "parallelism.tensor=2", "parallelism.pipeline=2")
    made = run(second, "model.kwargs.tied=true", *layout)
    losses, weights = plain(weights_of(first), tied=True)
    require_close(made.losses, losses)
    require_same_weights(weights_of(second), weights, [name for name in weights if name != "head.weight"])
    assert {each.shape for each in made.gradients[0]["table.weight"]} == {
        (-(-tensor_models.TOKENS // 2), tensor_models.WIDTH)
    }


@pytest.mark.costly
@pytest.mark.parametrize(
    ("schedule", "replicas"),
    [("pipedream_2bw", 2), ("pipedream", 1), ("pipemare", 1), ("hetpipe", 1), ("avgpipe", 1)],
)
def test_late_weights_are_as_late_as_without_parts(schedule: str, replicas: int, tmp_path: Path) -> None:
    layout = (
        "parallelism.pipeline=2",
        f"parallelism.data={replicas}",
        f"schedule={schedule}",
        "schedule.microbatches=2",
        "trainer.grad_clip_norm=null",
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = run(whole, *layout)
    made = divided(parts, *layout, "parallelism.tensor=2")
    require_close(made.losses, expected.losses)
    require_same_weights(weights_of(parts), weights_of(whole))


@pytest.mark.costly
@pytest.mark.parametrize("late", [("schedule.distance=1",), ("parallelism.pipeline=1", "schedule.wave=1")])
def test_workers_of_parts_exchange_as_workers_of_whole_layers(
    late: tuple[str, ...], start: dict[str, Tensor], tmp_path: Path
) -> None:
    """DistBelief's layout: as without parts; and, where nothing is late, what one process gives."""
    plainly = ("optimizer=sgd", "optimizer.momentum=0", "optimizer.lr=0.1", "trainer.grad_clip_norm=null")
    common = [each for each in _COMMON if not each.startswith(("optimizer.", "trainer.grad"))]
    named = (*common, *plainly, "optimizer.weight_decay=0", "parallelism=distbelief", *late)
    made = train(resolve([*named, _SHARDING]), _made(tmp_path / "parts"))
    expected = train(resolve([*named, "parallelism.tensor=1"]), _made(tmp_path / "whole"))
    require_close(made.losses, expected.losses)
    require_same_weights(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"))
    assert made.record.bytes_moved["tensor"] == made.plan.tensor_bytes_sent
    if "schedule.wave=1" in late:
        model = tensor_models.build()
        model.load_state_dict(start)
        losses = _trained(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), norm=torch.inf)
        require_close(made.losses, losses)
        require_same_weights(weights_of(tmp_path / "parts"), {k: v.detach() for k, v in model.state_dict().items()})


@pytest.mark.costly
def test_a_run_goes_on_in_every_other_layout(start: dict[str, Tensor], tmp_path: Path) -> None:
    layouts = [
        ("parallelism.pipeline=2", "parallelism.tensor=2"),
        ("parallelism.data=2",),
        ("parallelism.tensor=4",),
        ("parallelism.pipeline=4",),
        ("parallelism=three_d", "schedule.microbatches=2", "zero=1"),
        ("parallelism.data=2", "parallelism.tensor=2", "zero=1"),
        ("parallelism.pipeline=2",),
    ]
    before: Path | None = None
    seen: list[float] = []
    for number, layout in enumerate(layouts, 1):
        folder = tmp_path / str(number)
        sharding = (
            (_SHARDING,)
            if "tensor=1" not in str(layout) and ("tensor" in str(layout) or "three" in str(layout))
            else ()
        )
        resume = () if before is None else (f"resume={before}/checkpoints/step-{number - 1}.ckpt",)
        made = run(folder, *layout, *sharding, *resume, f"trainer.max_steps={number}")
        seen += made.losses[-1:]
        before = folder
    losses, weights = plain(start, steps=len(layouts))
    require_close(seen, losses)
    assert before is not None
    require_same_weights(weights_of(before), weights)


@pytest.mark.costly
def test_dropout_goes_on_in_every_other_layout(tmp_path: Path) -> None:
    """Masks are of micro-batches of whole values: those of two replicas are those of two micro-batches in turn.

    Each run writes its checkpoint in parts, one file per rank.
    """
    dropout, twice = "model.kwargs.dropout=0.1", "schedule.microbatches=2"
    layouts = [
        (_SHARDING, "parallelism.pipeline=2", "parallelism.tensor=2", twice),
        ("parallelism.data=2",),
        (_SHARDING, "parallelism.tensor=4", twice),
        ("parallelism.pipeline=4", twice),
        (_SHARDING, "parallelism=three_d"),
    ]
    expected = run(tmp_path / "whole", dropout, twice, f"trainer.max_steps={len(layouts)}")
    seen: list[float] = []
    for step, layout in enumerate(layouts, 1):
        resume = (f"resume={tmp_path / str(step - 1)}/checkpoints/step-{step - 1}.ckpt",) if step > 1 else ()
        words = (dropout, *layout, *resume, "checkpoint=asynchronous", f"trainer.max_steps={step}")
        seen += run(tmp_path / str(step), *words).losses[-1:]
    require_close(seen, expected.losses)
    require_same_weights(weights_of(tmp_path / str(len(layouts))), weights_of(tmp_path / "whole"))


@pytest.mark.costly
def test_parts_of_a_checkpoint_go_on_as_parts_of_layers(start: dict[str, Tensor], tmp_path: Path) -> None:
    """What each rank has written by itself, of whole layers or of parts of them, every other layout reads.

    The vocabulary of the model is divided with padding, and a weight has three pieces.
    """
    in_parts = "checkpoint=asynchronous"
    layouts = [
        (in_parts, "parallelism.pipeline=2", "parallelism.data=2"),
        (in_parts, _SHARDING, "parallelism.pipeline=2", "parallelism.tensor=2"),
        (in_parts, "parallelism.data=2"),
        (in_parts, _SHARDING, "parallelism.tensor=4"),
        (in_parts, _SHARDING, "parallelism=three_d"),
        (in_parts, _SHARDING, "parallelism.tensor=2", "parallelism.data=2", "zero=1"),
        (_SHARDING, "parallelism.tensor=2"),
        (in_parts, "parallelism.data=2"),
    ]
    seen: list[float] = []
    resume: tuple[str, ...] = ()
    for step, layout in enumerate(layouts, 1):
        folder = tmp_path / str(step)
        seen += run(folder, *layout, *resume, f"trainer.max_steps={step}").losses[-1:]
        saved = folder / "checkpoints" / f"step-{step}.ckpt"
        assert saved.is_dir() == (in_parts in layout)
        resume = (f"resume={saved}",)
    losses, weights = plain(start, steps=len(layouts))
    require_close(seen, losses)
    require_same_weights(weights_of(folder), weights)


@pytest.mark.costly
def test_errors_of_compression_go_on_beside_parts_of_layers(tmp_path: Path) -> None:
    """Each rank keeps its own, which are no parts of one tensor."""
    common = (
        _SHARDING,
        "parallelism.tensor=2",
        "parallelism.data=2",
        "compression=powersgd",
        "checkpoint=asynchronous",
    )
    whole = run(tmp_path / "whole", *common, "trainer.max_steps=4")
    run(tmp_path / "first", *common, "trainer.max_steps=2")
    resume = f"resume={tmp_path / 'first' / 'checkpoints' / 'step-2.ckpt'}"
    again = run(tmp_path / "again", *common, "trainer.max_steps=4", resume)
    assert again.losses == whole.losses
    for name, value in weights_of(tmp_path / "whole").items():
        assert torch.equal(weights_of(tmp_path / "again")[name], value), name


@pytest.mark.costly
def test_parts_of_layers_are_saved_as_they_are_and_planned(tmp_path: Path) -> None:
    """No rank writes more than its own, no row of padding is in a file, and what is read is what one file has."""
    common = (_SHARDING, "parallelism.tensor=4", "trainer.ema_decay=0.9", "trainer.max_steps=2")
    whole = run(tmp_path / "whole", *common)
    parts = run(tmp_path / "parts", *common, "checkpoint=asynchronous", "resume=null")
    assert parts.losses == whole.losses
    counted, predicted = zip(*peaks(parts), strict=True)
    assert counted[0] == max(counted) == pytest.approx(predicted[0], rel=0.01), "it also saves what all of them have"
    saved, file = (tmp_path / name / "checkpoints" / "step-2.ckpt" for name in ("parts", "whole"))
    found, expected = read_checkpoint(saved), read_checkpoint(file)
    for key in ("state_dict", "averaged_weights"):
        assert found[key].keys() == expected[key].keys()
        assert all(torch.equal(found[key][name], value) for name, value in expected[key].items())
    (own,), (other,) = found["optimizer_states"], expected["optimizer_states"]
    for name, entries in other["state"].items():
        assert all(torch.equal(own["state"][name][key], value) for key, value in entries.items()), name
    kept = read_parts(saved)["state_dict"]["table.weight"]
    assert isinstance(kept, DividedTensor)
    assert sum(len(each) for each in kept.parts.values()) == kept.shape[0] % 4 + kept.shape[0] // 4 * 4
    assert kept.shard.padding


@pytest.mark.costly
def test_a_damaged_checkpoint_of_a_divided_model_is_refused(tmp_path: Path) -> None:
    """One bit of a weight that ranks divide is enough, which the first rank has put together."""
    divided(tmp_path, "parallelism.tensor=2", "trainer.max_steps=1")
    saved = tmp_path / "checkpoints" / "step-1.ckpt"
    request = resolve([*_COMMON, _SHARDING, "parallelism.tensor=2", f"resume={saved}"])
    assert with_checkpoint(request).resume == str(saved)
    good, weight = saved.read_bytes(), weights_of(tmp_path)["block0.out.weight"].numpy().tobytes()
    at = good.index(weight) + len(weight) - 1
    saved.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(RequestError, match="must be auto or a good checkpoint's file. It is damaged or cut short"):
        with_checkpoint(request)


@pytest.mark.costly
def test_a_damaged_part_of_a_divided_model_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bit of what the second of the ranks has written that divide layers."""
    words = (_SHARDING, "parallelism.tensor=2", "checkpoint=asynchronous")
    run(tmp_path / "first", *words, "trainer.max_steps=1")
    saved = tmp_path / "first" / "checkpoints" / "step-1.ckpt"
    part = saved / "rank-1-of-2.safetensors"
    good = bytearray(part.read_bytes())
    good[-1] ^= 1
    part.write_bytes(good)
    again = (f"resume={saved}", f"run_dir={tmp_path / 'again'}", "trainer.max_steps=2")
    assert main(["train", *_COMMON, *words, *again]) == 2
    told = capsys.readouterr().err
    assert f"resume = {saved}: must be auto or a good checkpoint" in told
    assert "rank-1-of-2.safetensors is damaged: its bytes do not have the sum" in told
    assert not (tmp_path / "again").exists()


@pytest.mark.costly
def test_every_layout_exports_the_same_file(tmp_path: Path) -> None:
    """Of a trained model, which goes on in other layouts for a step that changes no weight."""
    trained = divided(tmp_path / "trained", "parallelism.tensor=2", "parallelism.pipeline=2")
    layouts = {
        "parts": (_SHARDING, "parallelism.tensor=4"),
        "grid": (_SHARDING, "parallelism=three_d"),
        "stages": ("parallelism.pipeline=4",),
        "replicas": ("parallelism.data=2",),
        "whole": (),
    }
    still = (f"resume={tmp_path}/trained/checkpoints/step-{STEPS}.ckpt", f"trainer.max_steps={STEPS + 1}")
    files = []
    for name, layout in layouts.items():
        run(tmp_path / name, *layout, *still, "optimizer.lr=1e-50", "optimizer.weight_decay=0")
        files.append(exported(tmp_path / name, f"{name}.safetensors"))
    assert trained.losses[-1] < trained.losses[0]
    first, *others = [_header_and_data(file) for file in files]
    assert all(other == first for other in others)
    weights = weights_of(tmp_path / "trained")
    assert all(torch.equal(value, weights[name]) for name, value in load_file(files[0]).items())


def _header_and_data(file: Path) -> tuple[Any, bytes]:
    """Of a file of safetensors, which writes the two words of the metadata in any order."""
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def exported(run_dir: Path, name: str, *words: str) -> Path:
    """What the command writes of a run."""
    assert main(["export", str(run_dir), str(run_dir.parent / name), *words]) == 0
    return run_dir.parent / name


@pytest.mark.costly
def test_the_same_layout_goes_on_bitwise(tmp_path: Path) -> None:
    layout = (_SHARDING, "parallelism.tensor=2", "model.kwargs.dropout=0.1")
    whole, first, second = tmp_path / "whole", tmp_path / "first", tmp_path / "second"
    run(whole, *layout, "trainer.max_steps=4")
    run(first, *layout, "trainer.max_steps=2")
    run(second, *layout, "trainer.max_steps=4", f"resume={first}/checkpoints/step-2.ckpt")
    expected = weights_of(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(second).items())


@pytest.mark.costly
@pytest.mark.parametrize("sequence", ["parallelism.sequence=false", SEQUENCE])
def test_dropout_of_whole_values_is_that_of_one_process(sequence: str, tmp_path: Path) -> None:
    """Also where each rank has its own tokens of them, for which it takes its part of the whole mask."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = run(whole, "model.kwargs.dropout=0.1")
    made = divided(parts, "model.kwargs.dropout=0.1", "parallelism.tensor=2", sequence)
    require_close(made.losses, expected.losses)


def test_bytes_between_parts_are_those_of_the_formula(tmp_path: Path) -> None:
    """Megatron's count: a sum for attention and for the feed-forward, forward and back, those of embedding and head."""
    made = divided(tmp_path, "parallelism.tensor=2")
    activation = 8 * tensor_models.LENGTH * tensor_models.WIDTH * 4
    blocks, head_norm, logits = 4, 2 * 4 * tensor_models.WIDTH // tensor_models.HEADS, 8 * tensor_models.LENGTH * 14 * 4
    sums = (2 * blocks + 1) * 2 * activation + blocks * head_norm
    sent = 2 * (sums * 2 // 2 + logits // 2)  # of both ranks; a sum of two ranks sends as many bytes as it has
    assert made.record.bytes_moved["tensor"] == sent
    assert made.plan.tensor_bytes_sent == sent


@pytest.mark.costly
@pytest.mark.parametrize(
    "layout",
    [
        ("parallelism.tensor=4", "parallelism.pipeline=2", "schedule=zb_h1", "schedule.microbatches=2"),
        (SEQUENCE, "parallelism.tensor=2", "schedule.microbatches=2"),
    ],
)
def test_a_loss_takes_parts_of_logits(layout: tuple[str, ...], start: dict[str, Tensor], tmp_path: Path) -> None:
    made = divided(tmp_path, *layout, "loss.target=runner.zoo.losses:token_cross_entropy")
    losses, weights = plain(start)
    require_close(made.losses, losses)
    require_same_weights(weights_of(tmp_path), weights)
    assert made.plan.profile.divided_logits == "head"
    assert made.record.bytes_moved["tensor"] == made.plan.tensor_bytes_sent
    require_peaks(made)


@pytest.mark.costly
@pytest.mark.parametrize("sequence", ["parallelism.sequence=false", SEQUENCE])
def test_with_64_bits_parts_differ_by_their_rounding_alone(sequence: str, tmp_path: Path) -> None:
    """A mistake as small as the rounding of 32 bits would be seen here."""
    double = ("precision=fp64", "loss.target=runner.zoo.losses:token_cross_entropy")
    first, parts = tmp_path / "first", tmp_path / "parts"
    run(first, *double, *_STANDING)
    start = weights_of(first)
    assert {value.dtype for value in start.values()} == {torch.float64}
    made = divided(parts, *double, "parallelism.tensor=2", "parallelism.pipeline=2", sequence)
    losses, weights = plain(start)
    torch.testing.assert_close(torch.tensor(made.losses).double(), torch.tensor(losses).double(), rtol=1e-12, atol=0)
    for name, value in weights_of(parts).items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-12, msg=name)
    require_peaks(made)


@pytest.mark.costly
def test_a_loss_of_parts_exchanges_three_numbers_per_target(tmp_path: Path) -> None:
    target = "loss.target=runner.zoo.losses:token_cross_entropy"
    made = divided(tmp_path, "parallelism.tensor=2", "trainer.max_steps=1", target)
    tokens, blocks, head_norm = 8 * tensor_models.LENGTH, 4, 2 * 4 * tensor_models.WIDTH // tensor_models.HEADS
    sums = (2 * blocks + 1) * 2 * tokens * tensor_models.WIDTH * 4 + blocks * head_norm
    assert made.record.bytes_moved["tensor"] == 2 * (sums + 3 * tokens * 4)


@pytest.mark.costly
def test_bytes_between_parts_of_tokens_are_those_of_the_formula(tmp_path: Path) -> None:
    """As many as without, in halves of twice as many messages; and the gradients of weights that all tokens share."""
    made = divided(tmp_path, "parallelism.tensor=2", SEQUENCE)
    activation = 8 * tensor_models.LENGTH * tensor_models.WIDTH * 4
    blocks, head_norm, logits = 4, 2 * 4 * tensor_models.WIDTH // tensor_models.HEADS, 8 * tensor_models.LENGTH * 14 * 4
    norms_and_biases = (2 + 1 + 2) * 4 * tensor_models.WIDTH
    sums = (2 * blocks + 1) * 2 * activation + blocks * (head_norm + norms_and_biases)
    sent = 2 * (sums * 2 // 2 + logits // 2)
    assert made.record.bytes_moved["tensor"] == sent
    assert made.plan.tensor_bytes_sent == sent


@pytest.mark.costly
@pytest.mark.parametrize(
    ("layout", "boundaries"),
    [
        (("parallelism=three_d", "schedule.microbatches=2"), 1),
        (("parallelism.tensor=4", "parallelism.pipeline=2", "schedule=zb_v", "schedule.microbatches=4"), 2),
        (("parallelism.tensor=2", "parallelism.pipeline=2", "schedule=chimera", "schedule.microbatches=4"), 1),
    ],
)
def test_parts_of_boundaries_are_put_together(layout: tuple[str, ...], boundaries: int, tmp_path: Path) -> None:
    """Narayanan et al.'s count: one part from each rank, instead of the whole; the same bits arrive."""
    scatter = "parallelism.scatter_boundaries=true"
    plain, scattered = tmp_path / "plain", tmp_path / "scattered"
    whole, made = divided(plain, *layout), divided(scattered, *layout, scatter)
    assert made.losses == whole.losses
    expected = weights_of(plain)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(scattered).items())
    ranks = made.plan.topology.num_shards
    activation = 8 * tensor_models.LENGTH * tensor_models.WIDTH * 4  # of all micro-batches and replicas
    for kind in ("activations", "activation_gradients"):
        assert whole.record.bytes_moved[kind] == ranks * boundaries * activation
        assert made.record.bytes_moved[kind] == boundaries * activation
    assert made.record.bytes_moved["tensor"] == made.plan.tensor_bytes_sent
    assert whole.record.bytes_moved["tensor"] == whole.plan.tensor_bytes_sent
    gathered = 2 * boundaries * (ranks - 1) * activation
    assert made.record.bytes_moved["tensor"] - whole.record.bytes_moved["tensor"] == gathered
    require_peaks(made)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("parallelism.tensor=2", "model.target=tensor_models:undividable"), "must divide a layer"),
        (
            ("parallelism.tensor=2", "model.target=tensor_models:narrowing", "parallelism.sharding={1.0: column}"),
            "must leave the output of layer 1 (Sequential) whole",
        ),
        (("parallelism.tensor=8", _SHARDING), "must divide layer 1 (Block)"),
        (
            ("parallelism.tensor=2", "model.kwargs.tied=true", _SHARDING.replace("column_gathered", "whole")),
            "must divide head and table alike. They hold the same weight, and table is embedding",
        ),
        (
            ("parallelism.tensor=2", "model.kwargs.tied=true", _SHARDING.replace("embedding", "whole")),
            "must divide head and table alike. They hold the same weight, and table is whole",
        ),
        (("parallelism.tensor=2", "parallelism.sharding={*.nothing: row}"), "must name modules"),
        (("parallelism.tensor=2", _SHARDING[:-1] + ",x: row}"), "must name modules"),
        (("parallelism.tensor=2", "parallelism.sharding={*.out: rows}"), "must be one of column, packed_column"),
        (("parallelism.tensor=2", "parallelism.sharding={*.out: row:a}"), "must have whole numbers of at least 1"),
        (("parallelism.tensor=2", "parallelism.sharding={*.out: row:2:-2}"), "must have whole numbers of at least 1"),
        (("parallelism.tensor=2", _SHARDING, "optimizer=kfac"), "must be one of adam"),
        (
            (
                "parallelism.tensor=2",
                "parallelism.pipeline=2",
                _SHARDING,
                "schedule=varuna",
                "schedule.opportunistic=true",
            ),
            "schedule.opportunistic = true: must be false with parallelism.tensor=2",
        ),
        (
            ("parallelism.tensor=2", "parallelism.data=2", _SHARDING, "zero=1", "offload=optimizer_cpu"),
            "offload.optimizer = cpu: must be none with parallelism.tensor=2",
        ),
        (("parallelism.sharding={*.out: row}",), "parallelism.sharding"),
        (("parallelism.scatter_boundaries=true",), "parallelism.scatter_boundaries = true: belongs to"),
        (
            ("parallelism.tensor=2", "parallelism.scatter_boundaries=true", _SHARDING),
            "parallelism.scatter_boundaries = true: needs parallelism.pipeline=2 or more",
        ),
        ((SEQUENCE,), "parallelism.sequence = true: belongs to parallelism.tensor=2"),
        (("parallelism.tensor=4", _SHARDING, SEQUENCE), "6 tokens cannot be divided among 4 ranks"),
        (
            ("parallelism.tensor=2", SEQUENCE, "model.target=tensor_models:pooled"),
            "must find values between layers that ranks can divide by tokens",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(overrides: tuple[str, ...], text: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=re.escape(text)):
        run(tmp_path, *overrides)


@pytest.mark.costly
def test_a_part_that_is_not_finite_skips_the_step_on_all_ranks(start: dict[str, Tensor], tmp_path: Path) -> None:
    """In the second step, the gradient is infinite at logits that the second rank makes: all weights stay."""
    made = divided(
        tmp_path, "parallelism.tensor=2", "parallelism.pipeline=2", "trainer.on_nonfinite=skip",
        "loss.target=tensor_models:overflowing",
    )  # fmt: skip
    assert made.record.extras["skipped_steps"] == [2]
    model = tensor_models.build()
    model.load_state_dict(start)
    require_close(made.losses, _trained(model, skipped=2))
    require_same_weights(weights_of(tmp_path), model.state_dict())


@pytest.mark.costly
def test_a_whole_weight_that_differs_between_parts_ends_the_run(tmp_path: Path) -> None:
    """The norms of one part drift: the losses alone would not tell it."""
    with pytest.raises(RunFailedError, match="the copies of block0.norm.bias on ranks 0 and 1 differ"):
        divided(tmp_path, "parallelism.tensor=2", "model.target=tensor_models:drifting", "schedule.twin_check_every=1")
