"""A pipeline of a LightningModule whose ``training_step`` is all there is computes what the step computes."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import step_modules
import torch

from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.model.figures import bare
from runner.model.load import LoadedModel, load_model
from runner.model.logged_names import not_called_notes
from runner.profiling.model import profile_model


def _config(module: str, *overrides: str) -> RunConfig:
    names = f"model.target=step_modules:{module}", "data.target=step_modules:samples"
    return resolve([*names, "parallelism.pipeline=3", "schedule.microbatches=2", "device=cpu", *overrides])


def _chain(model: LoadedModel) -> list[torch.nn.Module]:
    return [layer.build() for layer in model.layers]


@pytest.mark.costly
@pytest.mark.parametrize("module", ["Plain", "Weighted", "Counts", "Rebuilds"])
def test_layers_and_loss_are_the_step(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(module)
    model = load_model(config)
    chain = _chain(model)
    assert len(chain) >= 3
    assert len(profile_model(config).layers) == len(chain), "on fake tensors, too"
    batch = step_modules.samples()[:7]
    reference = getattr(step_modules, module)()
    monkeypatch.setattr(reference, "log", lambda *args, **kwargs: None)
    reference.load_state_dict(model.made.state_dict())
    wanted = reference.training_step(batch, 0)
    wanted, weight = (wanted["loss"], wanted.get("weight")) if isinstance(wanted, dict) else (wanted, None)
    value = batch[0]
    for layer in chain:
        value = layer(value)
    made = bare(model.loss(value, batch[1]))
    total, counted = made if isinstance(made, tuple) else (made, None)
    if weight is not None:
        assert counted == weight
        wanted = wanted * weight
    torch.testing.assert_close(total, wanted, rtol=0, atol=0)
    torch.autograd.backward([total, wanted])
    expected = {name: weight.grad for name, weight in reference.named_parameters() if weight.grad is not None}
    held = {
        name: weight.grad for layer in chain for name, weight in layer.named_parameters() if weight.grad is not None
    }
    assert held.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(held[name], gradient, rtol=1e-6, atol=1e-8)


def test_a_step_that_fixes_the_size_of_the_batch_is_refused_in_words() -> None:
    with pytest.raises(RequestError, match="takes the batch's size as a plain number, as a loop over samples does"):
        load_model(_config("Loops"))


def test_what_steps_log_is_computed_beside_the_loss() -> None:
    model = load_model(_config("Logs"))
    batch, reference = step_modules.samples()[:7], step_modules.Logs()
    reference.load_state_dict(model.made.state_dict())
    logged: dict[str, Any] = {}
    reference.__dict__["log"] = lambda name, value, **_: logged.update({name: value})
    logs = model.logs
    assert logs.left_out == {
        "training_step": ["most", "value", "silent", "each", "all", "inside"],
        "validation_step": ["val_all", "noise"],
    }
    shown = {each.name: each.shown for each in logs.figures}
    assert shown == {"loss": {"prog_bar": True}, "hits": {"on_epoch": True}, "by_class": {}, "accuracy": {}}
    chain = _chain(model)
    made: Any = model.loss(reduce(lambda value, layer: layer(value), chain, batch[0]), batch[1])
    rows = made.rows(logs.figures, 7).split([each.num_rows for each in logs.figures])
    reference.training_step(batch, 0)
    for figure, part in zip(logs.figures, rows, strict=True):
        assert figure.value(part) == pytest.approx(float(logged[figure.name].detach()), rel=1e-6)
    assert not any(value.requires_grad for value in made.values)
    for layer in chain:
        layer.eval()
    with torch.no_grad():
        output = reduce(lambda value, layer: layer(value), chain, batch[0])
        reference.eval().validation_step(batch, 0)
    assert [metric.label for metric in logs.validation] == ["val_hits", "gap", "val_f1"]
    logged["val_f1"] = reference.f1.compute()
    for metric in logs.validation:
        whole = metric.value(metric.rows(output, batch[1], 7))
        assert whole == pytest.approx(float(logged[metric.label]), rel=1e-6)
        if metric.label == "val_f1":  # of parts, it is that of all samples, and no mean of the parts
            parts = [metric.rows(output[part], batch[1][part], 1) for part in (slice(2), slice(2, 7))]
            assert metric.value(sum(parts, torch.zeros(()))) == pytest.approx(whole, rel=1e-6)
            assert sum(map(metric.value, parts)) / 2 != pytest.approx(whole, rel=1e-2)


def test_a_validation_step_that_cannot_be_traced_is_told_by_its_source() -> None:
    model = load_model(_config("LogsNumber"))
    assert model.logs.validation == ()
    notes = not_called_notes(model.module, ["training_step", "validation_step"], model.logs.left_out)
    assert "LogsNumber.training_step is traced, so that these are not logged: most, value, " in notes[0]
    assert "LogsNumber.validation_step is not called here, so that nothing is logged as val_number; " in notes[1]


def test_the_module_is_as_it_was() -> None:
    made = load_model(_config("Plain")).made
    assert isinstance(made, step_modules.Plain)
    assert not {"forward", "log"} & vars(made).keys()
    assert made._trainer is None
    assert vars(made.accuracy)["_update_count"] == 0
    assert made.seen == []


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (
            "ReadsEpoch",
            r"ReadsEpoch.training_step reads current_epoch of the run, of which a trace would keep one value",
        ),
        ("ReadsNumber", r"ReadsNumber.training_step reads batch_idx, of which a trace would keep one value"),
        ("Remembers", r"Remembers.training_step changes seen, which a trace leaves out"),
        ("EmbedsTarget", r"computes with the weight named.weight and the target together"),
        ("DrawsWithTarget", r"draws random numbers \(aten.randn_like.default\) where it has the target"),
    ],
)
def test_a_step_that_a_trace_cannot_stand_for_is_refused(module: str, why: str) -> None:
    rule = r"must have a training_step that can be traced in a pipeline, or layers\(\) and loss\(output, target\)\. "
    with pytest.raises(RequestError, match=rf"step_modules:{module}: {rule}.*{why}.* Try parallelism.pipeline=1"):
        load_model(_config(module))
