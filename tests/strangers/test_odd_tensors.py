"""Weights and buffers that are not dense, real, of one size and with elements are kept exactly, or refused by name."""

from __future__ import annotations

from pathlib import Path

import odd_layers
import pytest
import torch
from odd_layers import KEPT, REFUSED
from odd_runs import assert_equal, batch, in_plain_pytorch, in_stages, profile_of, with_a_resume, words_of
from safetensors.torch import load_file, save_file
from torch import nn

from runner.config.compose.resolve import resolve
from runner.engine.update.copies import tensor_checksum
from runner.errors import RequestError
from runner.model.layers import layers_of
from runner.model.load import segments_of
from runner.model.precision import cast_module
from runner.model.traced.operators import trace
from runner.plan.make import make_plan
from runner.profiling.model import profile_model

GROWING = [kind for kind in KEPT if kind.startswith("mask")]
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:grad and param do not obey")


@pytest.mark.costly
@pytest.mark.parametrize("kind", KEPT)
def test_each_kind_trains_in_two_stages_as_in_plain_pytorch(kind: str) -> None:
    assert_equal(in_stages([kind, kind], 2, 2), in_plain_pytorch([kind, kind]))


@pytest.mark.parametrize("kind", [*GROWING, "complex buffer", "counts", "memory", "fading"])
def test_buffers_of_each_kind_change_once_where_layers_run_again(kind: str) -> None:
    assert_equal(in_stages([kind, kind], 2, 4, again=True), in_plain_pytorch([kind, kind]))


@pytest.mark.costly
@pytest.mark.parametrize(
    "kind", [*GROWING, "memory", "expanded buffer", "buffer of a subclass", "saved complex buffer"]
)
def test_buffers_of_each_kind_are_in_checkpoints(kind: str, tmp_path: Path) -> None:
    assert_equal(with_a_resume([kind], 2, tmp_path), in_plain_pytorch([kind]))


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_complex_weights_are_trained_saved_and_continued(optimizer: str, tmp_path: Path) -> None:
    kinds = ["complex weight", "complex weight"]
    assert_equal(with_a_resume(kinds, 2, tmp_path, optimizer=optimizer), in_plain_pytorch(kinds, optimizer))


def test_the_norm_of_complex_gradients_is_that_of_both_parts() -> None:
    kinds = ["complex weight"]
    found = in_stages(kinds, 2, 2, clip_norm=0.05)
    assert_equal(found, in_plain_pytorch(kinds, clip=0.05))
    assert not torch.equal(found.tensors["1.weight"], in_plain_pytorch(kinds).tensors["1.weight"])


def test_a_split_backward_has_the_gradients_of_complex_weights() -> None:
    kinds = ["complex weight", "complex buffer", "complex weight"]
    assert_equal(in_stages(kinds, 2, 4, schedule="zb_h1"), in_plain_pytorch(kinds))


def test_complex_weights_are_in_files_of_weights(tmp_path: Path) -> None:
    value = torch.complex(torch.rand(2, 3), torch.rand(2, 3))
    save_file({"turns": value}, tmp_path / "weights.safetensors")
    assert torch.equal(load_file(tmp_path / "weights.safetensors")["turns"], value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_format_of_16_bits_converts_real_numbers_alone(dtype: torch.dtype) -> None:
    kinds = ["complex buffer", "frozen places", "float64 buffer", "frozen truth values", "complex weight"]
    model = odd_layers.model(kinds)
    before = {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    weights = list(model.parameters())
    assert cast_module(model, dtype) is model
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert all(one is other for one, other in zip(weights, model.parameters(), strict=True))
    for name, value in before.items():
        expected = value.to(dtype) if value.is_floating_point() else value
        assert after[name].dtype is expected.dtype
        assert torch.equal(after[name].detach(), expected)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(kind: str) -> None:
    words = REFUSED[kind][1]
    with pytest.raises(RequestError) as refused:
        make_plan(resolve(words_of([kind])), profile_of([kind], 8))
    (problem,) = refused.value.problems
    assert words in problem.line()


def test_a_layer_that_is_made_later_is_refused_when_it_is_made() -> None:
    class Later(nn.Module):
        def layers(self) -> list[object]:
            return [lambda: nn.Linear(4, 4), lambda: nn.LazyLinear(3)]

    sources = layers_of(Later(), 0, "mine:build")
    sources[0].build()
    with pytest.raises(RequestError, match=r"model.target = mine:build: 1.weight must have a size"):
        sources[1].build()


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["optimizer=lamb"], "optimizer.name"),
        (["precision=bf16_master"], "precision.name"),
        (["trainer.grad_clip_value=1.0"], "trainer.grad_clip_value"),
        (["zero.stage=1"], "zero.stage"),
        (["compression=powersgd", "parallelism.data=2"], "compression.name"),
    ],
)
def test_options_that_would_read_complex_weights_as_real_ones_are_refused(words: list[str], path: str) -> None:
    with pytest.raises(RequestError) as refused:
        make_plan(resolve(words_of(["complex weight"], *words)), profile_of(["complex weight"], 4))
    assert path in [problem.path for problem in refused.value.problems if "1.weight" in problem.line()]


def test_a_buffer_that_layers_share_and_change_is_not_cut_into_stages() -> None:
    counts = odd_layers.Counting()
    shared = odd_layers.Counting()
    shared.total = counts.get_buffer("total")
    inputs, targets = batch(0)

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, odd_layers.WIDTH), counts, shared, nn.Linear(odd_layers.WIDTH, 3))

    from runner.profiling.model import profile_layers

    found = profile_layers(layers_of(build(), 0), inputs, targets, odd_layers.loss, torch.float32)
    assert found.shared_buffers == ("1.total",)
    apart = profile_of(["counts", "counts"], 8)
    assert apart.shared_buffers == ()


@pytest.mark.costly
def test_sparse_and_overlapping_buffers_are_counted_by_their_memory() -> None:
    plain, sparse, expanded = (
        profile_of([kind], 8).layers[1].weight_bytes for kind in ("counts", "sparse buffer", "expanded buffer")
    )
    linear = 4 * (odd_layers.WIDTH**2 + odd_layers.WIDTH)
    assert plain == linear + 3 * 8 + 4 * odd_layers.WIDTH
    assert expanded == linear + 4
    held = odd_layers.model(["sparse buffer"])[1].get_buffer("held")
    assert sparse == linear + held._nnz() * (2 * 8 + 4)
    of_a_command = profile_model(resolve(words_of(["sparse buffer"])))  # a fake tensor would have no elements
    assert of_a_command.layers[1].weight_bytes == sparse


@pytest.mark.costly
def test_a_plan_of_a_stranger_s_model_refuses_what_the_run_would() -> None:
    """With the profile that commands make, on fake tensors."""
    with pytest.raises(RequestError) as refused:
        profile_model(resolve(words_of(["weight without a size"])))
    (problem,) = refused.value.problems
    assert problem.line().startswith("model.target = odd_layers:model: 1.linear.weight must have a size.")
    kept = profile_model(resolve(words_of(["sparse buffer", "mask, lazy", "complex buffer"])))
    assert [row.num_parameters for row in kept.layers] == [30, 42, 42, 42, 21]


@pytest.mark.parametrize("form", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_copies_of_sparse_buffers_are_compared_by_places_and_values(form: str) -> None:
    matrix = torch.eye(4)
    other, moved = matrix.clone(), matrix.clone()
    other[1, 1], moved[1, 1], moved[1, 2] = 2.0, 0.0, 1.0
    plain, *different = (tensor_checksum(getattr(each, form)()) for each in (matrix, other, moved))
    assert plain == tensor_checksum(getattr(torch.eye(4), form)())
    assert plain not in different


def test_a_buffer_that_a_forward_changes_has_no_copies_in_one_pipeline() -> None:
    words = ["parallelism.pipeline=2", "schedule=chimera", "schedule.microbatches=4"]
    for kind, name in (("counts", "1.seen"), ("mask, first_in_forward", "1.mask")):
        with pytest.raises(RequestError) as refused:
            make_plan(resolve(words_of([kind], *words)), profile_of([kind], 2))
        (problem,) = refused.value.problems
        assert problem.line() == (
            f"schedule.name = chimera: must be a schedule of one pipeline, because a forward changes {name}. The "
            "copies of a stage would each see a part of the micro-batches, and change it otherwise. "
            "Try schedule=1f1b."
        )
    assert make_plan(resolve(words_of(["sparse buffer"], *words)), profile_of(["sparse buffer"], 2)).fits


@pytest.mark.costly
@pytest.mark.parametrize("kind", [*GROWING, "memory"])
def test_a_trace_that_would_leave_a_buffer_out_is_refused_and_leaves_no_trace(kind: str) -> None:
    model = odd_layers.Whole([kind])
    before = dict(model.named_buffers())
    with pytest.raises(RequestError) as refused:
        trace(model, batch(0)[0], "mine:build")
    (problem,) = refused.value.problems
    name = "kept" if kind == "memory" else "mask"
    assert problem.line() == (
        "model.target = mine:build: must not make buffers, or put others in their place, where it is traced. Its "
        f"forward does so with body.1.{name}, and a trace leaves that out. A layers() needs no trace. Try "
        "parallelism.pipeline=1."
    )
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    assert all(after[name] is value for name, value in before.items())


@pytest.mark.costly
@pytest.mark.parametrize(
    "kind", ["complex buffer", "complex weight", "float64 buffer", "expanded buffer", "empty weight"]
)
def test_a_traced_model_keeps_odd_tensors(kind: str) -> None:
    whole = odd_layers.Whole([kind])
    inputs = batch(0)[0]
    segments = segments_of(whole, trace(whole, inputs, "mine:build"), ["body.1"], wanted=1)
    assert len(segments) > 1
    value = inputs
    for segment in segments:
        value = segment.build()(value)
    assert torch.equal(value, whole(inputs))
