"""Whatever users' code keeps in a run's state or hyperparameters, no steps are lost to it."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import json
import pathlib
import random
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from resume_runs import run_here
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from runner.checkpoint.file import admitted, read_checkpoint, write_checkpoint
from runner.checkpoint.parts import write_part
from runner.checkpoint.plain import MISSING, as_plain
from runner.errors import RequestError
from runner.training.export import export


@dataclasses.dataclass
class Settings:
    width: int = 8
    where: Path = Path("data")


class Mode(enum.Enum):
    FAST = "fast"


class Level(enum.IntEnum):
    LOW = 1


class Pair(NamedTuple):
    left: int
    right: list[int]


class Opaque:
    pass


class Own(dict[str, Any]):
    pass


def itself() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


BACK: dict[str, Any] = {
    "config": OmegaConf.create({"lr": 0.1, "sizes": [1, 2], "twice": "${lr}"}),
    "list_config": OmegaConf.create([1, {"a": None}]),
    "part_of_a_config": OmegaConf.create({"lr": 0.1, "inner": {"rate": "${lr}"}}).inner,
    "namespace": argparse.Namespace(lr=0.1, where=pathlib.Path("data")),
    "simple_namespace": types.SimpleNamespace(a=(1, {2})),
    "path": pathlib.Path("data/x"),
    "numpy_float": np.float64(0.1),
    "numpy_half": np.float16(0.1),
    "numpy_int": np.int32(-7),
    "numpy_bool": np.bool_(True),
    "numpy_text": np.str_("abc"),
    "numpy_dtype": np.dtype("<f4"),
    "array": np.arange(6.0).reshape(2, 3),
    "array_of_big_endian": np.arange(3, dtype=">i4"),
    "array_turned": np.arange(6)[::-2],
    "array_empty": np.zeros((0, 3), np.float32),
    "array_scalar": np.array(3),
    "array_of_text": np.array(["a", "bc"]),
    "array_complex": np.array([1 + 2j]),
    "set": {3, 1, 2},
    "frozenset": frozenset({"b", "a"}),
    "sets_in_sets": {frozenset({1, 2}), frozenset({3})},
    "ordered": collections.OrderedDict(b=1, a={2}),
    "counter": collections.Counter("aab"),
    "default": collections.defaultdict(list, a=[1]),
    "deque": collections.deque([1, 2], maxlen=3),
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"\x00\xff"),
    "complex": 1 - 2j,
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([2, 3]),
    "slice": slice(1, None, 2),
    "range": range(1, 9, 3),
    "datetime": datetime.datetime(2020, 2, 3, 4, 5, 6, 7, tzinfo=datetime.UTC),
    "date": datetime.date(2020, 2, 3),
    "timedelta": datetime.timedelta(days=1, microseconds=5),
    "decimal": decimal.Decimal("0.10"),
    "fraction": fractions.Fraction(1, 3),
    "uuid": uuid.UUID(int=5),
    "keys": {1: "a", None: 2, 1.5: [], "x": ()},
    "nested": [({"a": [np.float32(0.5), {1}]},)],
    "not_finite": [float("inf"), -float("inf")],
    "large": 2**200,
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return type(left) is type(right) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return type(left) is type(right) and bool(left == right)


def through(state: Any, path: Path, *, in_parts: bool) -> Any:
    content = {"state_dict": {}, "global_step": 1, "callbacks": {"Mine": {"value": state}}}
    found = as_plain(content, in_parts=in_parts)
    assert not found.lost
    if in_parts:
        write_part(found.content, path, 0, 1)
    else:
        write_checkpoint(found.content, path)
    back = read_checkpoint(path)
    assert back.keys() == content.keys()
    return back["callbacks"]["Mine"]["value"]


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_state_comes_back_as_what_it_was(in_parts: bool, tmp_path: Path) -> None:
    found = through(BACK, tmp_path / "step-1.ckpt", in_parts=in_parts)
    assert [name for name, value in BACK.items() if not same(found[name], value)] == []


@pytest.mark.parametrize("in_parts", [False, True])
def test_generators_go_on_where_they_were(in_parts: bool, tmp_path: Path) -> None:
    own, numpys, plain = torch.Generator().manual_seed(3), np.random.default_rng(4), random.Random(5)
    old, philox = np.random.RandomState(6), np.random.Generator(np.random.Philox(7))
    torch.rand(3, generator=own), numpys.random(3), plain.random(), old.rand(3), philox.random()
    found = through([own, numpys, plain, old, philox], tmp_path / "step-1.ckpt", in_parts=in_parts)
    assert torch.equal(torch.rand(5, generator=found[0]), torch.rand(5, generator=own))
    assert (found[1].random(5) == numpys.random(5)).all()
    assert found[2].random() == plain.random()
    assert (found[3].rand(5) == old.rand(5)).all()
    assert (found[4].random(5) == philox.random(5)).all()


HELD: dict[str, Any] = {
    "dataclass": (Settings(), {"width": 8, "where": Path("data")}),
    "enum": (Mode.FAST, "fast"),
    "int_enum": (Level.LOW, 1),
    "named_tuple": (Pair(1, [2]), {"left": 1, "right": [2]}),
    "partial": (
        functools.partial(torch.optim.SGD, lr=0.1),
        {"_target_": "torch.optim.sgd.SGD", "_partial_": True, "lr": 0.1},
    ),
    "class": (torch.optim.SGD, "torch.optim.sgd.SGD"),
    "function": (torch.nn.functional.mse_loss, "torch.nn.functional.mse_loss"),
    "module": (nn.CrossEntropyLoss(), "CrossEntropyLoss()"),
    "object": (Opaque(), "<test_kinds_of_states.Opaque>"),
    "own_dict": (Own(a=Mode.FAST), {"a": "fast"}),
    "enum_keys": ({Mode.FAST: 1}, {"FAST": 1}),
}


@pytest.mark.parametrize("name", HELD)
def test_hyperparameters_of_no_kind_are_told_in_plain_values(name: str) -> None:
    value, told = HELD[name]
    file = io.BytesIO()
    torch.save(as_plain({"hyper_parameters": {"own": value}}).content, file)
    kept = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    own = kept["hyper_parameters"]["own"]
    assert {**own, "where": Path(own["where"])} == told if name == "dataclass" else own == told


@pytest.mark.parametrize(
    "value", [Mode.FAST, Level.LOW, Settings(), Pair(1, []), Opaque(), Own(), lambda: 1, iter([]), itself(), open]
)
def test_a_state_of_no_kind_is_named_and_left_out_as_a_whole(value: Any) -> None:
    callbacks = {"Mine": {"good": np.float64(1), "bad": [value]}, "Other": {"n": 1}}
    found = as_plain({"state_dict": {"w": torch.ones(1)}, "global_step": 1, "callbacks": callbacks, "own": value})
    assert found.content["callbacks"] == {"Other": {"n": 1}}
    assert {one.place.split("/")[0] for one in found.lost} == {"callbacks", "own"}
    assert found.content[MISSING].keys() == {one.place for one in found.lost}
    assert "runner_kinds" not in found.content
    json.dumps(found.content[MISSING])


def test_what_may_be_pickled_stays_what_it_is(tmp_path: Path) -> None:
    content = {"state_dict": {}, "global_step": 1, "callbacks": {"Mine": {"mode": Mode.FAST}}}
    (lost,) = as_plain(content).lost
    assert lost.names == ("test_kinds_of_states:Mode",)
    with admitted(lost.names):
        write_checkpoint(as_plain(content).content, tmp_path / "step-1.ckpt")
        assert read_checkpoint(tmp_path / "step-1.ckpt")["callbacks"]["Mine"]["mode"] is Mode.FAST


class Lit(pl.LightningModule):
    def __init__(self, own: Any, fails: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.fails = fails
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        if self.fails == "optimizer":
            return Remembers(self.parameters(), lr=0.1)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.fails == "scheduler":
            return [optimizer], [{"scheduler": Closed(optimizer, lambda step: 1.0), "interval": "step"}]
        return optimizer

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.fails == "hook" or (self.fails == "late_hook" and self.global_step):
            del checkpoint["state_dict"]
            raise RuntimeError("no")
        if self.fails == "value":
            checkpoint["own"] = lambda: 1


class Remembers(torch.optim.SGD):
    """Keeps an object for each weight, from the first step on."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = Opaque()
        return super().step(closure)


class Closed(torch.optim.lr_scheduler.LambdaLR):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "function": self.lr_lambdas[0]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "function"})


class Stateful(pl.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"function": lambda: 1}


HYPERPARAMETERS = {"config", "array", "path", "class", "module", "dataclass", "partial", "enum"}


def build(all_kinds: bool = False, fails: str = "") -> Lit:
    torch.manual_seed(3)
    values = BACK | {key: pair[0] for key, pair in HELD.items()}
    return Lit({name: values[name] for name in HYPERPARAMETERS} if all_kinds else None, fails)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(40, 6, generator=generator), torch.randint(0, 4, (40,), generator=generator))


RUN = ("model.target=test_kinds_of_states:build", "data.target=test_kinds_of_states:data", "data.batch_size=8",
       "device=cpu", "trainer.max_steps=2", "logger=csv", "trainer.progress=false")  # fmt: skip


def test_a_run_keeps_its_hyperparameters_in_a_file_without_pickled_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch, tmp_path / "run", "+model.kwargs.all_kinds=true", base=RUN)
    kept = torch.load(tmp_path / "run" / "checkpoints" / "step-2.ckpt", weights_only=True)
    assert kept["hyper_parameters"]["own"].keys() == HYPERPARAMETERS
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    assert weights.keys() == kept["state_dict"].keys()
    assert all(torch.equal(weights[key], value) for key, value in kept["state_dict"].items())


@pytest.mark.costly
@pytest.mark.parametrize(
    ("fails", "field", "steps", "asynchronous"),
    [("hook", "model.target", 0, "false"), ("value", "model.target", 0, "true"),
     ("scheduler", "lr_scheduler", 0, "false"), ("optimizer", "optimizer", 1, "true"),
     ("callback", "callbacks", 0, "false")],
)  # fmt: skip
def test_a_state_that_cannot_be_saved_is_refused_at_the_first_step(
    fails: str, field: str, steps: int, asynchronous: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: tuple[str, ...] = (f"+model.kwargs.fails={fails}", f"checkpoint.asynchronous={asynchronous}")
    if fails == "callback":
        run = (*run, "+callbacks.own.target=test_kinds_of_states:Stateful")
    with pytest.raises(RequestError) as refused:
        run_here(monkeypatch, tmp_path / "run", *run, base=RUN)
    (problem,) = refused.value.problems
    assert problem.path == field
    assert "try_first=false" in problem.line() or "allow_pickle" in problem.line()
    lines = (tmp_path / "run" / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == steps
    # Taken all the same, it loses nothing but that.
    made = run_here(monkeypatch, tmp_path / "again", *run, "checkpoint.try_first=false", base=RUN)
    assert (made["status"], made["steps"]) == ("ok", 2)
    assert len(made["not_saved"]) == 1
    exported = export(tmp_path / "again", tmp_path / "weights.safetensors")
    assert (exported.step, exported.tensors) == (2, 4)


class Extra(nn.Module):
    """Has a state of its own kind beside weights and buffers."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.kept = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def with_extra_state(kind: str) -> nn.Sequential:
    torch.manual_seed(3)
    state = torch.arange(3) if kind == "tensor" else {"count": 1}
    return nn.Sequential(nn.Linear(6, 5), Extra(state), nn.Linear(5, 4))


@pytest.mark.costly
def test_an_extra_state_is_saved_or_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("model.target=test_kinds_of_states:with_extra_state", "loss=cross_entropy")
    with pytest.raises(RequestError, match="model = 1._extra_state: must be a tensor"):
        run_here(monkeypatch, tmp_path / "no", *run, "model.kwargs.kind=plain", base=RUN)
    run_here(monkeypatch, tmp_path / "run", *run, "model.kwargs.kind=tensor", base=RUN)
    assert torch.equal(load_file(tmp_path / "run" / "weights.safetensors")["1._extra_state"], torch.arange(3))


def weights_of(run_dir: Path) -> Iterator[torch.Tensor]:
    yield from load_file(run_dir / "weights.safetensors").values()


@pytest.mark.costly
def test_a_hook_that_fails_later_costs_what_it_saves_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run_here(monkeypatch, tmp_path / "run", "+model.kwargs.fails=late_hook", "checkpoint.every=1", base=RUN)
    assert (made["status"], made["steps"]) == ("ok", 2)
    assert list(made["not_saved"]) == ["Lit.on_save_checkpoint"]
    assert "raised RuntimeError: no (test_kinds_of_states.py" in made["not_saved"]["Lit.on_save_checkpoint"]
    run_here(monkeypatch, tmp_path / "whole", base=RUN)
    assert all(map(torch.equal, weights_of(tmp_path / "run"), weights_of(tmp_path / "whole")))
    made = run_here(
        monkeypatch, tmp_path / "run", "+model.kwargs.fails=late_hook", "trainer.max_steps=3", "resume=auto",
        "checkpoint.try_first=false", base=RUN,
    )  # fmt: skip
    assert (made["status"], made["steps"]) == ("ok", 3)
