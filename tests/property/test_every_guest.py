"""One request for each option file of four groups, with all oracles: an option is checked by being there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from compressor_keys import examples_of
from draws import option_of
from oracles import check
from test_found import Found

from runner.config.schema import OptimizerConfig
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.strategies import STRATEGIES
from runner.optim.catalogue.registry import COMPRESSORS, OPTIMIZERS, PREDICTIONS

_LAYOUT = "parallelism.pipeline=2 schedule.microbatches=4 data.batch_size=32"
_MODELS = dict.fromkeys(("offload=activations_vdnn_conv", "activation_checkpoint=selective"), "convolutions")
"""Those that refuse a model of linear layers."""
_BESIDE = {"offload=weights_l2l": "schedule=looped_bfs schedule.chunks=1 activation_checkpoint=full"}
"""What the rules ask for besides."""
_PLAIN = {"activation_checkpoint", "offload"}
"""Groups whose options change no bit of what is trained."""


def _requests() -> Iterator[tuple[str, str]]:
    """Each option, and the words that it needs besides; those that search for long have tests of their own."""
    for name in option_of("activation_checkpoint"):
        strategy = STRATEGIES[name]
        needed = [f"{option.key}={option.example}" for option in strategy.options if option.required]
        if not (strategy.searches or strategy.compiles):
            yield f"activation_checkpoint={name}", " ".join(f"activation_checkpoint.{each}" for each in needed)
    for name in option_of("offload"):
        found = OFFLOADS.get(name.removeprefix("activations_"))
        if name.startswith("weights_") or name.startswith("activations_") and not (found and found.searches):
            yield f"offload={name}", ""
    for name in option_of("compression"):
        kind = COMPRESSORS[name]
        examples = [f"compression.{kind.place_of(key)}={value}" for key, value in examples_of(kind).items()]
        yield f"compression={name}", " ".join(["parallelism.data=2", *examples])
    for name in option_of("weight_prediction"):
        yield f"weight_prediction={name}", f"weight_prediction.gap=1 {_fitting_optimizer(name)}"


def _fitting_optimizer(prediction: str) -> str:
    """The first optimizer whose weights can be predicted in this way."""
    for name, kind in OPTIMIZERS.items():
        momentum = 0.9 if "momentum" in kind.reads else 0.0
        section = OptimizerConfig(name=name, momentum=momentum)
        if kind.operator is None and PREDICTIONS[prediction].problem_with(kind, section) is None:
            return f"optimizer={name}" + f" optimizer.momentum={momentum}" * bool(momentum)
    raise AssertionError(f"no optimizer's weights can be predicted by {prediction}")


_REQUESTS = dict(_requests())


@pytest.mark.costly
@pytest.mark.parametrize("option", _REQUESTS)
def test_every_option_runs_as_it_is_planned(option: str) -> None:
    """With the bytes that are predicted, and either the weights of the plain loop or those of a resumed run."""
    same = option.split("=")[0] in _PLAIN
    words = f"{_LAYOUT} {option} {_REQUESTS[option]} {_BESIDE.get(option, '')}"
    drawn = {} if same else {"resumed": {}, "saved": 1}
    outcome = check(Found(_MODELS.get(option, "mlp"), words, drawn).request)
    assert (outcome.kind, outcome.told) == ("ran", "")
    assert {"bits", "rounding"} & {*outcome.compared} if same else "resumed" in outcome.compared
