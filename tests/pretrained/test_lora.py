"""``adapter=lora``: a pipeline trains PEFT's adapters as a plain loop over a PEFT model, and hands them back."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of
from pretrained_folders import ARCHITECTURES
from safetensors.torch import load_file, save_file
from test_export_folders import finished_run
from test_pretrained_files import request as files_request
from test_pretrained_files import small
from test_pretrained_folders import COUNT, Batch, batches_of, cross_entropy, request, start_of
from torch import nn

from runner.cli.main import main
from runner.config.compose.resolve import resolve
from runner.config.schema import AdapterConfig, RunConfig
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.errors import RequestError
from runner.model.adapter import adapted, adapted_layers, is_adapters
from runner.model.check_pretrained import pretrained_problems
from runner.model.layers import layers_of
from runner.model.load import load_model
from runner.plan.make import make_plan
from runner.profiling.model import profile_model
from runner.schedule.catalogue.registry import build

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
CASE = ARCHITECTURES["llama"]
ADAPTER = AdapterConfig(name="lora", rank=4, alpha=8.0, targets=["q_proj", "v_proj", "down_proj"])
adam = partial(torch.optim.Adam, lr=0.01)
TWO_STAGES = ((0, 1), (2, 4))  # with a block in each
LAYOUTS = [
    (1, "1f1b"),
    (2, "1f1b"),
    pytest.param(2, "zb_v", marks=pytest.mark.full),
]


def asked(folder: Path, pipeline: int, schedule: str = "1f1b") -> RunConfig:
    found = request("llama", folder, pipeline=pipeline)
    return replace(found, adapter=ADAPTER, schedule=replace(found.schedule, name=schedule))


def as_peft(name: str) -> str:
    return f"base_model.model.{name}"


def plain_loop(folder: Path, start: dict[str, torch.Tensor], batches: list[Batch]) -> tuple[list[float], Any]:
    """Losses and the trained model of PEFT's own; it starts from the given weights."""
    import peft

    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(ADAPTER.targets))
    model = peft.get_peft_model(CASE.open(folder).train(), settings)
    model.load_state_dict({as_peft(name): value for name, value in start.items()})
    optimizer = adam([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses = []
    for inputs, targets in batches:
        model.zero_grad()
        total = 0.0
        for x, y in zip(inputs.tensor_split(COUNT), targets.tensor_split(COUNT), strict=True):
            loss = cross_entropy(model(input_ids=x).logits, y) * len(x)
            torch.autograd.backward(loss)
            total += loss.item()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(inputs)
        optimizer.step()
        losses.append(total / len(inputs))
    return losses, model


@pytest.mark.costly
@pytest.mark.parametrize(("pipeline", "schedule"), LAYOUTS)
def test_stages_train_as_pefts_own_loop(tmp_path: Path, pipeline: int, schedule: str) -> None:
    """One process has the bits of PEFT; the frozen weights keep theirs, and only adapters have gradients and states."""
    folder = CASE.save(tmp_path / "llama")
    config = asked(folder, pipeline, schedule)
    assert pretrained_problems(config) == []
    layers = load_model(config, filled=True).layers
    start = {name: value.clone() for name, value in start_of(layers).items()}
    base = CASE.make().state_dict()
    assert {name.replace(".base_layer.", "."): name for name in start if not is_adapters(name)}.keys() == base.keys()
    assert all(torch.equal(start[name], base[name.replace(".base_layer.", ".")]) for name in start if name in base)
    expected, model = plain_loop(folder, start, batches_of(CASE))
    weights = {name.removeprefix("base_model.model."): value for name, value in model.state_dict().items()}
    losses, found, states, trained = _pipeline(layers, pipeline, schedule)
    if pipeline == 1:
        assert losses == expected
        assert [name for name, value in weights.items() if not torch.equal(found[name], value)] == []
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=f"{name}: {{}}".format)
        assert is_adapters(name) != torch.equal(found[name], start[name]), name
    assert states == trained == sum(value.numel() for name, value in weights.items() if is_adapters(name))


def _pipeline(layers: list[Any], pipeline: int, schedule: str) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    order = build(schedule, ranks=pipeline, microbatches=COUNT)

    def run(transport: ThreadTransport) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
        made: list[torch.optim.Optimizer] = []

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            made.append(adam([each for each in parameters if each.requires_grad]))
            return made[0]

        engine = make_engine(
            layers, cross_entropy, transport, schedule=order, pipeline=pipeline, data=1, count=COUNT,
            optimizer=optimizer, cut=TWO_STAGES if order.stages == 2 else None,
        )  # fmt: skip
        own = [part_of(batch, transport, pipeline, 1, order) for batch in batches_of(CASE)]
        losses = [finished.loss for part in own for finished in engine.submit(part)]
        engine.drain()
        state = {k: v for stage in engine.stages.values() for k, v in stage.global_state().items()}
        states = sum(entry["exp_avg"].numel() for entry in made[0].state.values())
        trained = [p for stage in engine.stages.values() for p in stage.parameters() if p.grad is not None]
        return losses, state, states, sum(parameter.numel() for parameter in trained)

    results = run_ranks(pipeline, run)
    weights = {k: v for _, state, _, _ in results for k, v in state.items()}
    return results[0][0], weights, sum(r[2] for r in results), sum(r[3] for r in results)


def test_the_adapter_goes_back_to_peft_or_into_the_weights(tmp_path: Path) -> None:
    import peft

    folder = CASE.save(tmp_path / "llama")
    state = finished_run(asked(folder, 1), tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "peft"), "--format", "peft"]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "whole"), "--format", "huggingface"]) == 0
    base = CASE.make().eval()
    base.load_state_dict({k.replace(".base_layer.", "."): v for k, v in state.items() if not is_adapters(k)})
    tokens = CASE.inputs(2, torch.Generator().manual_seed(0))
    with torch.no_grad():
        model = peft.PeftModel.from_pretrained(base, str(tmp_path / "peft")).eval()
        expected = model(input_ids=tokens).logits
        whole = CASE.open(tmp_path / "whole").eval()
        torch.testing.assert_close(whole(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(whole(input_ids=tokens).logits, model.merge_and_unload()(input_ids=tokens).logits)


def test_other_formats_hold_the_merged_weights(tmp_path: Path) -> None:
    save_file(dict(small().state_dict()), tmp_path / "a.safetensors")
    config = replace(files_request(tmp_path / "a.safetensors"), adapter=replace(ADAPTER, targets=["0"]))
    assert pretrained_problems(config) == []
    state = finished_run(config, tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "b.safetensors")]) == 0
    found = load_file(tmp_path / "b.safetensors")
    assert set(found) == set(small().state_dict())
    added = 2.0 * state["0.lora_B.default.weight"] @ state["0.lora_A.default.weight"]
    torch.testing.assert_close(found["0.weight"], state["0.base_layer.weight"] + added)
    assert all(torch.equal(found[name], value) for name, value in state.items() if not name.startswith("0."))


def test_a_run_without_an_adapter_has_none_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(dict(small().state_dict()), tmp_path / "a.safetensors")
    finished_run(files_request(tmp_path / "a.safetensors"), tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "peft"]) == 2
    assert "--format = peft: needs a run with an adapter" in capsys.readouterr().err


class Listed(nn.Module):
    """Layers that are built one by one; the first is itself a target, the last has none."""

    def layers(self) -> list[Callable[[], nn.Module]]:
        block = partial(nn.Sequential, nn.Linear(4, 4))
        return [partial(nn.Linear, 4, 4), block, partial(nn.LayerNorm, 4)]


def test_layers_that_are_built_one_by_one() -> None:
    config = AdapterConfig(name="lora", rank=2, targets=["0"])
    model = adapted(Listed(), config)
    layers = [layer.build() for layer in adapted_layers(layers_of(model, 0), config, seed=0)]
    trained = [[name for name, p in layer.named_parameters() if p.requires_grad] for layer in layers]
    own = ["lora_A.default.weight", "lora_B.default.weight"]
    assert trained == [own, [f"0.{name}" for name in own], []]
    again = [layer.build() for layer in adapted_layers(layers_of(model, 0), config, seed=0)]
    pairs = zip(layers[0].named_parameters(), again[0].named_parameters(), strict=True)
    assert all(torch.equal(one, other) for (name, one), (_, other) in pairs if is_adapters(f".{name}"))


@pytest.mark.costly
def test_the_plan_counts_the_adapters_alone(tmp_path: Path) -> None:
    config = asked(CASE.save(tmp_path / "llama"), 1)
    config = replace(config, optimizer=replace(config.optimizer, name="adam"), device="cpu")
    (parts,) = make_plan(config, profile_model(config)).to_json()["parts"]
    adapters = sum(v.numel() for k, v in start_of(load_model(config).layers).items() if is_adapters(k))
    assert parts["gradients"] == 4 * adapters


def test_wrong_targets(tmp_path: Path) -> None:
    config = asked(CASE.save(tmp_path / "llama"), 1)
    with pytest.raises(RequestError, match=r"adapter.targets = nothing: must name layers. No layer .* it has .*q_proj"):
        load_model(replace(config, adapter=replace(ADAPTER, targets=["nothing"])))
    with pytest.raises(
        RequestError, match=r"adapter.targets = \[\]: must name layers. PEFT knows none for a Sequential"
    ):
        adapted(nn.Sequential(nn.Linear(2, 2)), replace(ADAPTER, targets=[]))


def test_a_tied_target_is_refused(tmp_path: Path) -> None:
    config = request("llama_tied", ARCHITECTURES["llama_tied"].save(tmp_path / "llama"), pipeline=1)
    rule = r"adapter.targets = \['lm_head'\]: must name layers with weights of their own"
    with pytest.raises(RequestError, match=rule):
        load_model(replace(config, adapter=replace(ADAPTER, targets=["lm_head"])))


def test_names_that_no_layer_has_are_refused_where_layers_are_built_later() -> None:
    words = ["model=gpt", "adapter=lora", "device=cpu"]
    with pytest.raises(RequestError, match=r"adapter.targets = q_proj: must name layers"):
        profile_model(resolve([*words, "adapter.targets=[q_proj]"]))


@pytest.mark.costly
def test_a_plan_makes_no_adapter_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of which a machine holds no layer are planned, too: all tensors of the profile are fake."""
    folder = CASE.save(tmp_path / "llama")

    def refused(*_: Any) -> None:
        raise AssertionError("profiled on real tensors")

    monkeypatch.setattr("runner.profiling.model._on_real_tensors", refused)
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    profile = profile_model(replace(asked(folder, 2), hardware=resolve(["hardware=a100_80gb"]).hardware))
    trained = sum(layer.gradient_bytes for layer in profile.layers)
    assert 0 < trained < sum(layer.weight_bytes for layer in profile.layers)


def test_names_that_no_layer_has_are_told_beside_those_that_layers_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=gpt", "adapter=lora", "adapter.targets=[qkv]"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("adapter.targets = qkv: must name layers.")
    assert "it has attention_out, down, positions, query_key_value, to_logits, tokens, up." in line
