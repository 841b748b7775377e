"""The profile between two micro-batch sizes, beside the one that is made for it."""

from __future__ import annotations

from dataclasses import fields

import pytest
from plan_profiles import layer, model

from runner.config.compose.resolve import resolve
from runner.plan.planners.problem import interpolated
from runner.plan.stages.scale import between, for_samples
from runner.profile import LayerProfile, ModelProfile
from runner.profiling.model import profile_model

MODEL = ("model=gpt", "model.kwargs.layers=1", "model.kwargs.width=32", "data=random_tokens")
ASKED = (*MODEL, "loss=token_cross_entropy", "precision=bf16_mixed", "hardware=a100_80gb")
EXACT = ("weight_bytes", "gradient_bytes", "saved_bytes", "output_bytes", "forward_transient_bytes")


def profile_of(samples: int) -> ModelProfile:
    return profile_model(resolve([*ASKED, f"data.batch_size={samples}"]))


def sizes(profile: ModelProfile) -> list[dict[str, int]]:
    names = [each.name for each in fields(LayerProfile) if each.name.endswith("_bytes") and "int" in str(each.type)]
    return [
        {name: value for name in names if isinstance(value := getattr(layer, name), int)}
        for layer in (*profile.layers, profile.loss)
    ]


def test_a_size_is_on_the_line_of_two_known_ones_and_else_in_proportion() -> None:
    few, many = model([layer(saved_bytes=130)]), model([layer(saved_bytes=430)], samples=4)
    for known, samples, saved in (
        ([few, many], 2, 230), ([few, many], 4, 430), ([few, many], 1, 130), ([few, many], 8, 830),
        ([few], 2, 260), ([few, few], 2, 260), ([many], 2, 215), ([many, many], 2, 215),
    ):  # fmt: skip
        made = interpolated(known, samples)
        assert (made.samples, made.layers[0].saved_bytes) == (samples, saved)


@pytest.mark.costly
def test_casts_of_weights_do_not_grow_with_the_samples() -> None:
    few, asked, many = profile_of(1), profile_of(4), profile_of(16)
    made = between(few, many, 4)
    assert (made.samples, made.input_bytes, len(made.layers)) == (4, asked.input_bytes, len(asked.layers))
    for found, expected in zip(sizes(made), sizes(asked), strict=True):
        assert {name: found[name] for name in EXACT} == {name: expected[name] for name in EXACT}
        assert all(found[name] >= expected[name] for name in expected)  # lines between two peaks are above peaks
    in_proportion = sum(layer["saved_bytes"] for layer in sizes(for_samples(many, 4)))
    assert in_proportion < sum(layer["saved_bytes"] for layer in sizes(asked))  # autocast's casts: what lines are for
    assert (between(few, many, 1), between(few, many, 16)) == (few, many)
