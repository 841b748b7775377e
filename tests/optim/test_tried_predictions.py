"""A user's own prediction of weights is tried before a run, with the states of the request's optimizer."""

from __future__ import annotations

import pytest
import torch
from plan_profiles import layer, model
from torch import Tensor

from runner.config.compose.resolve import resolve
from runner.errors import RequestError
from runner.optim.catalogue.prediction import Moment, PredictionKind
from runner.profile import ModelProfile, OwnUpdate
from runner.profiling.try_prediction import try_prediction

PROFILE = model([layer(trained_shapes=((6, 5), (6,))), layer(trained_shapes=((2, 3, 9, 9),))])
SEEN: list[Moment] = []


def ahead(moment: Moment, share: float = 1.0) -> Tensor:
    SEEN.append(moment)
    found: Tensor = moment.weight - share * moment.gap * moment.rate * moment.state["momentum_buffer"]
    return found


def nothing(moment: Moment) -> None:
    return None


def flat(moment: Moment) -> Tensor:
    return moment.weight.reshape(-1)


def of_matrices(moment: Moment) -> Tensor:
    return moment.weight if moment.weight.dim() > 1 else moment.weight[:, None]


KIND = PredictionKind(name="any", description="", predict=ahead, reads=("momentum_buffer",))


def tried(name: str, *words: str, profile: ModelProfile = PROFILE) -> None:
    own = ["weight_prediction.name=mine", f"weight_prediction.target={__name__}:{name}", "weight_prediction.gap=2"]
    optimizer = ["optimizer=sgd", "optimizer.momentum=0.9"] if not any("optimizer=" in each for each in words) else []
    try_prediction(resolve([*own, *optimizer, *words]), profile)


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    SEEN.clear()


@pytest.mark.parametrize("name", ["ahead", "KIND"])
def test_a_good_one_is_called_for_weights_of_each_number_of_axes(name: str) -> None:
    tried(name)
    assert [(tuple(each.weight.shape), each.gap, len(each.rates)) for each in SEEN] == [
        ((4, 4), 2.0, 2), ((4,), 2.0, 2), ((2, 3, 4, 4), 2.0, 2),
    ]  # fmt: skip
    assert all(float(each.state["momentum_buffer"].abs().max()) > 0 for each in SEEN)


def test_it_gets_the_masters_where_there_are_some() -> None:
    tried("ahead", "precision=bf16_master")
    assert all(torch.equal(each.weight, each.state["master"]) for each in SEEN)


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("nothing", (), r"must return a tensor of the weight's shape. It returned a NoneType for a tensor of \(4, 4\)"),
        ("flat", (), r"must return a tensor of the weight's shape. It returned a tensor of \(16,\)"),
        ("of_matrices", (), r"It returned a tensor of \(4, 1\) for a tensor of \(4,\)"),
        (
            "ahead",
            ("optimizer=adam",),
            r"KeyError: 'momentum_buffer' \(test_tried_predictions.py:\d+\). The optimizer's states of a weight are "
            "step, exp_avg, exp_avg_sq",
        ),
    ],
)
def test_a_wrong_one_is_refused(name: str, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(RequestError, match=f"^weight_prediction.target = {__name__}:{name}: .*{said}"):
        tried(name, *words)


def test_a_formula_of_matrices_is_taken_where_all_weights_are_some() -> None:
    tried("of_matrices", profile=model([layer(trained_shapes=((6, 5),))]))


@pytest.mark.parametrize("optimizer", ["optimizer=sgd optimizer.momentum=0", "optimizer=lamb"])
def test_what_another_rule_refuses_is_left_to_it(optimizer: str) -> None:
    """Without momentum, or with states that do not say where weights move, nothing can be predicted."""
    tried("nothing", *optimizer.split())


def test_the_optimizer_of_a_module_is_not_known_here() -> None:
    update = OwnUpdate(temporaries=2, lingering=1, at_once=0.0)
    tried("ahead", "optimizer=auto", profile=model([layer(trained_shapes=((6, 5),))], own_update=update))
    assert not SEEN
