"""Attention by one means or another gives what one process gives with torch's own choice, and keeps what is planned."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import tensor_models
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from whole_runs import Run, peaks, train

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.model.kernels.attention import Attention

STEPS = 3
COMMON = (
    "model=custom", "model.target=tensor_models:build", "data=custom", "data.target=tensor_models:data", "loss=custom",
    "loss.target=tensor_models:loss", "data.batch_size=8", "data.shuffle=false", "optimizer.lr=0.01",
    "optimizer.eps=1e-3", "optimizer.weight_decay=0.1", "device=cpu", "hardware=laptop_cpu", "logger=none",
    "trainer.progress=false", "launcher.watchdog_seconds=null", f"trainer.max_steps={STEPS}", "seed=3",
)  # fmt: skip


def run(folder: Path, *overrides: str) -> Run:
    folder.mkdir(exist_ok=True)
    return train(resolve([*COMMON, *overrides]), folder)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "weights.safetensors")


def plain(start: dict[str, Tensor], models: Any = tensor_models) -> tuple[list[float], dict[str, Tensor]]:
    model = models.build()
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)
    losses = []
    for step in range(STEPS):
        samples = [models.data()[8 * step + at] for at in range(8)]
        inputs, targets = (torch.stack([sample[part] for sample in samples]) for part in (0, 1))
        loss = models.loss(model(inputs), targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("start")
    run(folder, "optimizer.lr=1e-30", "optimizer.weight_decay=0", "trainer.max_steps=1")
    return weights_of(folder)


@pytest.mark.costly
@pytest.mark.parametrize("kernels", ["eager", "fused"])
@pytest.mark.parametrize(
    "layout",
    [
        ("parallelism.pipeline=1",),
        ("parallelism.pipeline=2", "schedule=zb_h1", "schedule.microbatches=2"),
        ("parallelism.tensor=2", "activation_checkpoint=full"),
    ],
)
def test_it_is_equal_to_rounding(
    kernels: str, layout: tuple[str, ...], start: dict[str, Tensor], tmp_path: Path
) -> None:
    made = run(tmp_path, f"kernels={kernels}", *layout)
    losses, weights = plain(start)
    torch.testing.assert_close(torch.tensor(made.losses), torch.tensor(losses), rtol=2e-6, atol=2e-6)
    for name, value in weights_of(tmp_path).items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=3e-5, msg=name)
    for counted, predicted in peaks(made):
        assert 0.9 * predicted <= counted <= predicted


def saved_bytes(block: torch.nn.Module, value: Tensor, backend: SDPBackend) -> int:
    """The bytes of all memory that the backward of a layer keeps besides weights and input."""
    own = {each.untyped_storage().data_ptr() for each in (*block.parameters(), value)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), sdpa_kernel([backend]):
        output = block(value)
    assert output.requires_grad
    return sum(num_bytes for place, num_bytes in kept.items() if place not in own)


@pytest.mark.costly
def test_plans_count_the_probabilities_that_one_operator_does_not_keep(tmp_path: Path) -> None:
    saved = {}
    for kernels in ("eager", "fused"):
        made = run(tmp_path / kernels, f"kernels.attention={kernels}", "trainer.max_steps=1")
        saved[kernels] = made.plan.profile.layers[1].saved_bytes
    block: torch.nn.Module = tensor_models.build()[1]
    value = torch.randn(8, tensor_models.LENGTH, tensor_models.WIDTH, requires_grad=True)
    expected = [saved_bytes(block, value, each) for each in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)]
    assert saved["eager"] - saved["fused"] == expected[0] - expected[1] > 0


@pytest.mark.costly
def test_an_attention_inside_a_module_of_torch_is_found(tmp_path: Path) -> None:
    saved = {}
    for kernels in ("eager", "fused"):
        module = "model.target=tensor_models:attending"
        made = run(tmp_path / kernels, f"kernels.attention={kernels}", module, "trainer.max_steps=2")
        saved[kernels] = made.plan.profile.layers[1].saved_bytes
        for counted, predicted in peaks(made):
            assert 0.9 * predicted <= counted <= predicted
    assert saved["eager"] > saved["fused"]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("kernels=fused", "model.target=tensor_models:undividable"), "must find an attention"),
        (("kernels.attention=quick",), "must be null or one of eager, fused"),
        (("kernels=eager", "compile=true"), "must be false with kernels=eager or one"),
        (("kernels=fused", "model.target=tensor_models:dropping"), "must have a fused operator"),
    ],
)
def test_what_there_is_not_is_refused(overrides: tuple[str, ...], text: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=text):
        run(tmp_path, *overrides)


def test_ranks_that_are_threads_leave_torch_s_choice_as_it_was() -> None:
    """Two layers that overlap in time: the one that began first ends first."""
    first_is_in, second_is_in = threading.Event(), threading.Event()

    def first(value: object) -> None:
        first_is_in.set()
        assert second_is_in.wait(600)

    def second(value: object) -> None:
        second_is_in.set()
        thread.join()
        assert not torch._C._get_math_sdp_enabled()  # still limited for this one

    thread = threading.Thread(target=Attention("fused").around(first), args=(None,))
    thread.start()
    assert first_is_in.wait(600)
    Attention("fused").around(second)(None)
    assert torch._C._get_math_sdp_enabled()
