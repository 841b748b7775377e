"""What the device holds of tensors on their way to the host, added up by hand."""

from __future__ import annotations

from dataclasses import replace

from runner.plan.stages.on_the_way import MovedLayer, OnTheWay
from runner.profile import LayerMoves


def layer(num_bytes: int, forward: int, backward: int, *, needs: tuple[int, ...] = (0,), **moves: object) -> MovedLayer:
    """A layer that moves so many bytes, with its own peaks."""
    made = replace(LayerMoves(num_bytes, num_bytes, needs=needs), **moves)  # type: ignore[arg-type]
    return MovedLayer(made, 1.0, 1.0, forward, backward)


LAYERS = (layer(10, 10, 4), layer(6, 6, 3), layer(6, 6, 2), layer(0, 1, 5, needs=()))


def test_a_load_stays_on_the_device_until_another_needs_its_room() -> None:
    way = OnTheWay(12)
    # 10; 6 + the first, 10; 6 + 6, because the first has left for the second; 1 + 12, for which there is room
    assert way.forward((0, 0), LAYERS) == max(10, 6 + 10, 6 + 6, 1 + 12)
    assert way.leaving_bytes == 12


def test_one_by_one_a_load_waits_for_the_one_before() -> None:
    way = OnTheWay(12)
    alone = tuple(each._replace(moves=replace(each.moves, one_by_one=True)) for each in LAYERS)
    assert way.forward((0, 0), alone) == max(10, 6 + 10, 6 + 6, 1 + 6)
    assert way.leaving_bytes == 6
    # the last load only is fetched for the layer that moves nothing; then the next one at each use, and never two ahead
    assert way.backward((0, 0), alone) == max(6 + 6, 5 + 6 + 6, 2 + 6 + 6, 3 + 6 + 10, 4 + 10)


def test_loads_come_back_ahead_as_many_as_the_largest_is_worth() -> None:
    way = OnTheWay(12)
    way.forward((0, 0), LAYERS)
    # 6 is fetched ahead, 12 are leaving; at its use the loads sent before have left, and the next 6 comes; then the 10
    assert way.backward((0, 0), LAYERS) == max(12 + 6, 5 + 12 + 6, 2 + 6 + 6, 3 + 6 + 10, 4 + 10)
    assert way.leaving_bytes == 0


def test_what_a_layer_makes_before_it_asks_for_something_moved_is_beside_what_is_leaving() -> None:
    asks = layer(100, 100, 20)._replace(asking_bytes=30)
    stays = layer(0, 0, 5, needs=(0,))  # it keeps what it saves, and asks for nothing that was moved
    for layers in ((layer(10, 10, 4), asks), (layer(10, 10, 4), asks, stays)):
        way = OnTheWay(100)
        way.forward((0, 0), layers)
        # 100 are leaving and are fetched, when the layer asks for them; then they have left, and 10 come besides
        assert way.backward((0, 0), layers) == 30 + 100 + 100


def test_what_is_sent_after_a_use_stays() -> None:
    way = OnTheWay(12)
    way.forward((0, 0), LAYERS)
    way.forward((0, 1), LAYERS)
    assert way.backward((0, 0), LAYERS) == 12 + max(6, 5 + 6, 2 + 6 + 6, 3 + 6 + 10, 4 + 10)
    assert way.leaving_bytes == 12
    assert way.split_backward((0, 1), LAYERS, 25) == max(12 + 22, 5 + 12 + 22, 25)
    assert way.leaving_bytes == 0


def test_an_input_that_was_moved_is_there_while_a_layer_runs() -> None:
    first, other = layer(10, 10, 4), layer(0, 3, 3, needs=(1,), entering=((1, 7),))
    way = OnTheWay(10)
    assert way.forward((0, 0), (first, other)) == max(10, 3 + 10)  # it is a part of the load that has not left
    way = OnTheWay(10)
    middle = layer(8, 8, 8)
    last = layer(0, 3, 3, needs=(2,), entering=((2, 7),))
    assert way.forward((0, 0), (first, middle, last)) == max(10, 8 + 10, 3 + 8 + 7)


def test_a_segment_is_sent_when_its_last_layer_has_run() -> None:
    start, end = layer(10, 10, 0, sent_after=1), layer(0, 5, 9, needs=(1,))
    way = OnTheWay(10)
    assert way.forward((0, 0), (start, end)) == 5 + 10
    assert way.leaving_bytes == 10
    assert way.backward((0, 0), (start, end)) == max(10 + 10, 9 + 10)
