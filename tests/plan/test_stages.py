from __future__ import annotations

from dataclasses import fields, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_profiles import layer, loss_layer, model

from runner.plan.stages.figures import LayerRanges, stage_figures
from runner.plan.stages.scale import for_samples
from runner.profile import LayerProfile, profile_from_json

_BYTES = st.integers(0, 50)
_OF_STATES = ("optimizer", "statistics", "home_weight", "home_gradient", "elsewhere")
_OF_WEIGHTS = ("weight", "gradient", "largest_parameter", *_OF_STATES)
_ADDED_LATER = ("held_output", "pending_output", "copied", "home_optimizer", "fetched")  # to a profile that is scaled


@st.composite
def layers(draw: st.DrawFn) -> LayerProfile:
    names = ("saved_bytes", "output_bytes", "forward_transient_bytes", "backward_transient_bytes", "gradient_bytes")
    return layer(**{name: draw(_BYTES) for name in names}, largest_parameter_bytes=draw(_BYTES))


def forward_peak(chain: list[LayerProfile]) -> int:
    """Layer by layer, as it is said in words."""
    live = peak = 0
    for one in chain:
        peak = max(peak, live + one.saved_bytes + one.forward_transient_bytes)
        live += one.saved_bytes
    return peak


def backward_peak(chain: list[LayerProfile], output_bytes: int, input_bytes: int) -> int:
    """Live bytes relative to the start of B, where all that was saved and the output's gradient are alive.

    At its end, all gradients of the input are there: of tensors that are not used, too, as zeros.
    """
    live = peak = 0
    for at in reversed(range(len(chain))):
        gradient = 0 if at == len(chain) - 1 else chain[at].output_bytes
        peak = max(peak, live + gradient + chain[at].backward_transient_bytes)
        live -= chain[at].saved_bytes
        if at == len(chain) - 1:
            live += output_bytes  # held until B ends
    return max(peak, live + input_bytes) if input_bytes else peak


@settings(max_examples=100, deadline=None)
@given(chain=st.lists(layers(), min_size=1, max_size=9), loss=layers(), data=st.data())
def test_figures_of_any_range_equal_a_walk_over_its_layers(
    chain: list[LayerProfile], loss: LayerProfile, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(chain) - 1))
    last = data.draw(st.integers(first, len(chain) - 1))
    loss = loss_layer(saved_bytes=loss.saved_bytes, backward_transient_bytes=loss.backward_transient_bytes)
    figures = LayerRanges(model(chain, loss=loss)).figures(first, last)
    is_last = last == len(chain) - 1
    walked = [*chain[first : last + 1], *([loss] if is_last else [])]
    output = 0 if is_last else chain[last].output_bytes
    received = chain[first - 1].output_bytes if first else 0
    assert figures.saved_bytes == sum(one.saved_bytes for one in walked)
    assert figures.gradient_bytes == sum(one.gradient_bytes for one in walked)
    assert figures.largest_parameter_bytes == max(one.largest_parameter_bytes or one.gradient_bytes for one in walked)
    assert figures.forward_peak_bytes == forward_peak(walked)
    assert figures.backward_peak_bytes == backward_peak(walked, output, received)
    assert figures.input_bytes == received
    assert figures.output_bytes == output


def test_twice_the_samples_need_twice_the_bytes_of_everything_that_is_no_weight() -> None:
    names = [each.name for each in fields(LayerProfile) if each.name.endswith("_bytes") and "int" in str(each.type)]
    scaled = [name for name in names if name.removesuffix("_bytes") not in (*_OF_WEIGHTS, *_ADDED_LATER)]
    one = replace(layer(), gradient_bytes=0, **{name: 8 * place for place, name in enumerate(scaled, 1)})  # type: ignore[arg-type]
    doubled = for_samples(model([one]), 2).layers[0]
    assert {name: getattr(doubled, name) for name in scaled} == {name: 2 * getattr(one, name) for name in scaled}


def test_unused_parts_of_an_input_get_gradients_when_a_backward_ends() -> None:
    head = layer(saved_bytes=4, output_bytes=2, backward_transient_bytes=6)
    chain = [layer(output_bytes=80), head, layer()]
    loss = loss_layer(saved_bytes=1, backward_transient_bytes=0)
    used, last = stage_figures(model(chain, loss=loss), ((0, 0), (1, 2)))
    assert used.backward_peak_bytes == chain[0].backward_transient_bytes
    assert last.backward_peak_bytes == last.later_backward_peak_bytes == 80 - last.saved_bytes
    assert last.growing_backward_peak_bytes == last.backward_peak_bytes + last.gradient_bytes
    assert last.input_backward_peak_bytes == 80 + last.deferred_bytes - last.saved_bytes


def test_the_last_stage_has_the_loss() -> None:
    profile = model([layer()] * 4, loss=loss_layer(saved_bytes=5, forward_seconds=0.5, backward_seconds=0.25))
    first, last = stage_figures(profile, ((0, 1), (2, 3)))
    assert (first.saved_bytes, last.saved_bytes) == (60, 65)
    assert (first.forward_seconds, first.backward_seconds) == (2.0, 4.0)
    assert (last.forward_seconds, last.backward_seconds) == (2.5, 4.25)


def test_a_profile_scales_with_its_samples_but_for_the_weights() -> None:
    profile = model([layer(backward_transient_bytes=100)], samples=2)
    scaled = for_samples(profile, 3)
    one = scaled.layers[0]
    assert (one.weight_bytes, one.gradient_bytes) == (40, 40)
    assert (one.saved_bytes, one.output_bytes, one.forward_transient_bytes) == (45, 15, 8)
    assert one.backward_transient_bytes == 40 + 90  # the weight gradient does not grow
    assert (one.forward_seconds, one.backward_flops) == (1.5, 300.0)
    assert (scaled.samples, scaled.input_bytes, scaled.target_bytes) == (3, 11, 5)
    assert for_samples(profile, 2) is profile


def test_a_written_profile_is_read_back_exactly() -> None:
    profile = model([layer(forward_seconds=0.1 + 0.2)] * 2, tokens_per_sample=3)
    assert profile_from_json(profile.to_json()) == profile
