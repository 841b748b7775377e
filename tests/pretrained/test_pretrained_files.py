"""Files of weights for any model: by global names, by a name map, of any dtype, and what is refused in one line."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from runner.config.schema import DataConfig, LossConfig, ModelConfig, RunConfig
from runner.errors import RequestError
from runner.model.check_pretrained import pretrained_problems
from runner.model.layers import build_stage
from runner.model.load import load_model


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Lazy(nn.Module):
    """Layers that are built one by one."""

    def layers(self) -> list[Callable[[], nn.Module]]:
        return [lambda: nn.Linear(4, 3), lambda: nn.Linear(3, 2)]


def request(path: Path, target: str = "small", **model: Any) -> RunConfig:
    module = "test_pretrained_files"
    return RunConfig(
        model=ModelConfig(target=f"{module}:{target}", pretrained=str(path), **model),
        data=DataConfig(target="runner.zoo.data:random_regression"),
        loss=LossConfig(target="runner.zoo.losses:mse"),
    )


def started(config: RunConfig) -> dict[str, torch.Tensor]:
    """The weights with which a run would start."""
    layers = load_model(config, filled=True).layers
    return build_stage(layers, 0, len(layers) - 1).global_state()


def lines(config: RunConfig) -> list[str]:
    try:
        return [problem.line() for problem in pretrained_problems(config)]
    except RequestError as error:
        return [problem.line() for problem in error.problems]


def written(file: Path, state: dict[str, torch.Tensor]) -> Path:
    save_file(state, file)
    return file


def test_one_file_with_buffers_and_another_dtype(tmp_path: Path) -> None:
    torch.manual_seed(3)
    state = {
        name: value.bfloat16() if value.is_floating_point() else value + 7
        for name, value in small().state_dict().items()
    }
    config = request(written(tmp_path / "a.safetensors", state))
    assert lines(config) == []
    found = started(config)
    assert list(found) == list(state)
    assert all(torch.equal(found[name], value.to(found[name].dtype)) for name, value in state.items())


def test_layers_that_are_built_one_by_one(tmp_path: Path) -> None:
    config = request(tmp_path / "a.safetensors", "Lazy")
    state = {
        "0.weight": torch.randn(3, 4),
        "0.bias": torch.randn(3),
        "1.weight": torch.randn(2, 3),
        "1.bias": torch.ones(2),
    }
    written(tmp_path / "a.safetensors", state)
    assert lines(config) == []
    assert all(torch.equal(value, state[name]) for name, value in started(config).items())


def test_missing_unexpected_and_wrong_names_are_a_line_each(tmp_path: Path) -> None:
    state = dict(small().state_dict())
    state["0.weigth"] = state.pop("0.weight")
    state["2.weight"] = torch.zeros(2, 5)
    file = written(tmp_path / "a.safetensors", state)
    start = f"model.pretrained = {file}: must"
    assert lines(request(file)) == [
        f"{start} hold 2.weight with the shape (2, 3). It is (2, 5) in the files. Try model.pretrained_names=FILE with "
        "the line 2.weight: null, and model.pretrained_strict=false.",
        f"{start} hold 0.weight. The nearest unused name is 0.weigth. Try model.pretrained_strict=false.",
        f"{start} not hold 0.weigth. The nearest missing name is 0.weight. Try model.pretrained_strict=false.",
    ]
    with pytest.raises(RequestError, match=r"must hold 0.weight\."):
        started(request(file))  # as a rank refuses it


def test_what_the_files_lack_stays_fresh_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {name: value + 1 for name, value in small().state_dict().items() if not name.startswith("2.")}
    file = written(tmp_path / "a.safetensors", {**state, "other": torch.zeros(1)})
    config = request(file, pretrained_strict=False)
    with caplog.at_level("INFO"):
        assert lines(config) == []
    assert [record.message for record in caplog.records] == ["stays fresh: 2.weight", "stays fresh: 2.bias"]
    found, fresh = started(config), load_model(config).made.state_dict()
    assert all(torch.equal(found[name], state.get(name, fresh[name])) for name in found)


def test_a_layer_for_other_classes_starts_fresh(tmp_path: Path) -> None:
    """As the message about its shape advises."""
    state = {name: value + 1 for name, value in small().state_dict().items()}
    state |= {"2.weight": torch.zeros(5, 3), "2.bias": torch.zeros(5)}
    written(tmp_path / "a.safetensors", state)
    assert len(lines(request(tmp_path / "a.safetensors", pretrained_strict=False))) == 2
    (tmp_path / "names.yaml").write_text("2.weight: null\n2.bias: null\n")
    names = str(tmp_path / "names.yaml")
    config = request(tmp_path / "a.safetensors", pretrained_strict=False, pretrained_names=names)
    assert lines(config) == []
    found = started(config)
    assert found["2.weight"].shape == (2, 3)
    assert all(torch.equal(found[name], value) for name, value in state.items() if not name.startswith("2."))


def test_names_of_another_convention(tmp_path: Path) -> None:
    state = dict(small().state_dict())
    names = {"first": "0", "norm": "1", "last": "2"}
    other = {
        f"net.{new}.{name.split('.', 1)[1]}": v
        for name, v in state.items()
        for new, old in names.items()
        if name.startswith(old)
    }
    written(tmp_path / "a.safetensors", {**other, "mask": torch.zeros(1)})
    expressions = {rf"net\.{new}\.(.*)": rf"{old}.\1" for new, old in names.items()} | {"mask": None}
    (tmp_path / "names.yaml").write_text(json.dumps(expressions))
    config = request(tmp_path / "a.safetensors", pretrained_names=str(tmp_path / "names.yaml"))
    assert lines(config) == []
    assert all(torch.equal(value, state[name]) for name, value in started(config).items())
    for content, told in (
        ("[1]", "must map expressions of names to names, or to null"),
        ("'(': a", "must have regular expressions: (: a. Missing ), unterminated subpattern at position 0"),
        (r"a: b\1", r"must have regular expressions: a: b\1. It has no group 1"),
        ("'.*': a", "must give each tensor a name of its own"),
    ):
        (tmp_path / "names.yaml").write_text(content)
        assert f"model.pretrained_names = {tmp_path / 'names.yaml'}: {told}".casefold() in lines(config)[0].casefold()


def test_what_holds_no_weights_is_refused(tmp_path: Path) -> None:
    def told(path: Path) -> str:
        found = lines(request(path))
        assert len(found) == 1
        return found[0].removeprefix(f"model.pretrained = {path}: ")

    needs = "must hold model.safetensors, or shards and model.safetensors.index.json."
    folder = tmp_path / "folder"
    assert told(folder) == "must be a folder or a safetensors file. There is no such folder."
    assert told(tmp_path / "a.safetensors") == "must be a folder or a safetensors file. There is no such file."
    folder.mkdir()
    assert told(folder) == f"{needs} It holds neither."
    (folder / "config.json").write_text("{}")
    assert "It holds config.json alone, and this model does not read the architecture" in told(folder)
    (folder / "weights.safetensors").touch()
    assert told(folder).endswith(f"Try model.pretrained={folder}/weights.safetensors.")
    (folder / "pytorch_model.bin").touch()
    assert f"{needs} It holds pytorch_model.bin, a pickle, which may run code when it is read." in told(folder)
    assert "It is a pickle by its name" in told(folder / "pytorch_model.bin")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    assert told(folder) == "must hold x.safetensors. model.safetensors.index.json says that 1 tensors are in it."
    (folder / "x.safetensors").write_bytes(b"no header")
    assert "must be a good safetensors file" in lines(request(folder))[0]
    written(folder / "x.safetensors", {"b": torch.zeros(1)})
    assert told(folder) == "must have the tensors that its index names. x.safetensors has no a."
    for content in ("{}", "[", '{"weight_map": {"a": "../x.safetensors"}}'):
        (folder / "model.safetensors.index.json").write_text(content)
        assert "must have a readable index" in lines(request(folder))[0]


class Calls:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("it ran",)


def test_a_distributed_checkpoint_is_read_and_its_metadata_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    state = dict(small().state_dict())
    save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    config = request(tmp_path / "dcp")
    assert lines(config) == []
    assert all(torch.equal(value, state[name]) for name, value in started(config).items())
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Calls()))
    assert "its metadata would call builtins.print" in lines(config)[0]
    assert "it ran" not in capsys.readouterr().out


def test_metadata_may_name_members_of_enumerations_and_no_other_attributes() -> None:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    from runner.model.pretrained.dcp import _member_of

    assert _member_of(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT") is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    for kind, name in ((_MEM_FORMAT_ENCODING, "__class__"), (dict, "fromkeys")):
        with pytest.raises(pickle.UnpicklingError, match="getattr"):
            _member_of(kind, name)
