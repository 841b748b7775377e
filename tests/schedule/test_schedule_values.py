from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.schedule import Action, Op, Payload, build, parse_action
from runner.schedule.values import COMPUTE

_number = st.integers(0, 5000)
_compute = st.builds(lambda *fields: Action(*fields), st.sampled_from(sorted(COMPUTE - {Op.FILL})), _number, _number)
_message = st.builds(
    lambda *fields: Action(*fields),
    st.sampled_from([Op.SEND, Op.RECV]),
    _number,
    _number,
    st.sampled_from(list(Payload)),
    _number,
)
_kind = st.sampled_from(["CURV_A", "CURV_B", "INV_A", "INV_B", "WARM"])
_fill = st.one_of(
    st.builds(lambda kind, s, m, w: Action(Op.FILL, s, m, window=w, fill=kind), _kind, *[_number] * 3),
    st.builds(lambda kind, s, w: Action(Op.FILL, s, window=w, fill=kind), _kind, _number, _number),
)
_window = st.builds(lambda op, s, w: Action(op, s, window=w), st.sampled_from([Op.REDUCE, Op.STEP]), _number, _number)


@given(st.one_of(_compute, _message, _window, _fill))
def test_text_form_round_trips(action: Action) -> None:
    assert parse_action(str(action)) == action


@given(st.text(alphabet="0123456789FBIWRSENDCVUTPA_<>@ ", max_size=14))
def test_what_parses_prints_the_same(text: str) -> None:
    try:
        action = parse_action(text)
    except ValueError:
        return
    assert str(action) == text


def test_text_forms() -> None:
    assert str(Action(Op.F, 2, 0)) == "2F0"
    assert str(Action(Op.SEND, 2, 0, Payload.ACTIVATION, 3)) == "2SEND_F0>3"
    assert str(Action(Op.RECV, 2, 7, Payload.GRADIENT, 3)) == "2RECV_B7<3"
    assert str(Action(Op.REDUCE, 3)) == "3REDUCE"
    assert str(Action(Op.STEP, 3, window=1)) == "3STEP@1"


@pytest.mark.parametrize(
    "text", ["", "0F0garbage", "1F", "F0", "02F0", "-1F0", "2SEND_F0<3", "2RECV_F0>3", "3STEP@0", "2F0 ", "1X2", "٣F0"]
)
def test_refuses_what_no_action_prints(text: str) -> None:
    with pytest.raises(ValueError, match="is no action"):
        parse_action(text)


def test_schedules_are_values() -> None:
    first, second = (build("1f1b", ranks=3, microbatches=4) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != build("gpipe", ranks=3, microbatches=4)
    assert (first.ranks, first.stages, first.microbatches, first.windows) == (3, 3, 4, 1)
    assert first.rank_of(2, 1) == 2
    assert first.stages_of(1) == (1,)
