"""Requests that draws have found to be wrong once, as small as they were made, with all oracles."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from draws import Drawn
from oracles import check

_GROUPS = {"mlp": "class_loss", "convolutions": "class_loss", "recurrent": "class_loss", "tied": "token_loss"}
_GROUPS |= {"shared": "token_loss", "skips": "two_losses", "buffers": "class_loss"}


@dataclass(frozen=True)
class Found:
    """A request.

    Args:
        model: its kind of model.
        words: the other words.
        drawn: what a draw says besides its words.
    """

    model: str
    words: str
    drawn: dict[str, object] = field(default_factory=dict)

    @property
    def request(self) -> Drawn:
        given = dict(word.split("=", 1) for word in self.words.split())
        model = {"model.target": "property_models:build", "model.kwargs.kind": self.model}
        data = {"data.target": "property_models:samples", "data.kwargs.kind": self.model}
        loss = {"loss.target": f"property_models:{_GROUPS[self.model]}"}
        return Drawn({**model, **data, **loss, **given}, **self.drawn)  # type: ignore[arg-type]

    def require_equal(self) -> None:
        """It runs, with the planned bytes, and equal to a plain loop; where it is resumed, in one process."""
        drawn = self.request
        if drawn.resumed is not None:
            own = ("parallelism", "schedule")
            drawn.resumed.update({key: value for key, value in drawn.words.items() if not key.startswith(own)})
        made = check(drawn)
        assert made.kind == "ran", made.told
        assert "bytes" in made.compared
        assert {"rounding", "bits"} & {*made.compared}


FOUND = {
    "a rehearsal did not come to the first compressed step": Found(
        "skips", "optimizer=onebit_adam_refreshed optimizer.freeze_step=1"
    ),
    "a stage that trains nothing could not save its part of compressed momentum": Found(
        "mlp", "parallelism.pipeline=4 optimizer=onebit_adam_refreshed trainer.freeze=[0.*]", {"saved": 1}
    ),
    "new residuals of compressed gradients were there during the update, beside the old ones": Found(
        "convolutions",
        "parallelism.data=2 data.batch_size=1 optimizer=adam_fp8 compression=gradzip trainer.freeze=[1.*]",
    ),
    "a rehearsal took each step at once that another rank's norm takes back": Found(
        "recurrent",
        "schedule=zb_v parallelism.pipeline=2 schedule.post_validation=true trainer.grad_clip_norm=0.5",
    ),
    "two tensors of every weight were there at once in AdaBelief's update": Found(
        "recurrent", "data.batch_size=1 optimizer=adabelief"
    ),
    "a plan with a correction of discrepancies could not be written": Found(
        "mlp",
        "schedule=pipemare parallelism.pipeline=2 schedule.microbatches=2 schedule.discrepancy_correction=0.5"
        " data.batch_size=4 optimizer=sgd",
    ),
    "signs of three replicas needed 67 % more than was planned": Found(
        "recurrent",
        "parallelism.pipeline=2 parallelism.data=3 schedule.microbatches=6 data.batch_size=15 compression=signsgd",
    ),
    "sums of a cell's weight in W needed 9 % more than was planned": Found(
        "recurrent", "schedule=zb_h1 parallelism.pipeline=2 schedule.microbatches=7 data.batch_size=7 optimizer=lars"
    ),
    "where backwards read the newest weights, forwards after a checkpoint do so, too": Found(
        "mlp",
        "schedule=ampnet parallelism.pipeline=2 schedule.microbatches=6 data.batch_size=12 optimizer=adamw",
        {"saved": 1},
    ),
    "lamb counted the steps of all of a rank's stages where each is updated alone": Found(
        "mlp", "schedule=wpipe parallelism.pipeline=2 schedule.microbatches=2 data.batch_size=4 optimizer=lamb"
    ),
    "fused_adam counted so, too": Found(
        "mlp", "schedule=wpipe parallelism.pipeline=2 schedule.microbatches=2 data.batch_size=4 optimizer=fused_adam"
    ),
    "masters of one stage wrote the weights of the rank's other one, which backwards read": Found(
        "skips",
        "schedule=wpipe parallelism.pipeline=2 schedule.microbatches=4 data.batch_size=4 precision=bf16_master",
    ),
    "muon keeps two values of a weight that is no matrix": Found(
        "convolutions", "optimizer=muon precision=bf16_master data.batch_size=2"
    ),
    "states shared out over one replica are updated all at once, too": Found(
        "skips", "schedule=dualpipe parallelism.pipeline=2 schedule.microbatches=4 data.batch_size=1 zero.stage=1"
    ),
    "a tied weight has one name where one rank has both its layers": Found("tied", "data.batch_size=4"),
    "a schedule keeps all of a tensor of whose part it makes a factor": Found(
        "recurrent",
        "schedule=pipefisher parallelism.pipeline=2 schedule.microbatches=5 data.batch_size=40 optimizer=kfac",
    ),
    "a layer needs what a layer of another stage has moved": Found(
        "skips",
        "schedule=interleaved_1f1b parallelism.pipeline=4 schedule.microbatches=4 data.batch_size=4"
        " model.kwargs.layers=8 offload=activations_pipeoffload",
    ),
    "each rank that divides a layer moves its activations": Found(
        "shared", "parallelism.tensor=2 data.batch_size=4 offload=activations_vdnn_all"
    ),
    "each rank that divides a layer moves its weights": Found(
        "shared", "parallelism.tensor=2 data.batch_size=4 offload=weights_blockswap model.kwargs.layers=8"
    ),
    "what several stages share is not compressed": Found(
        "tied",
        "schedule=gpipe parallelism.pipeline=2 parallelism.data=2 schedule.microbatches=2 data.batch_size=4"
        " compression=signsgd model.kwargs.layers=2",
    ),
    "a chunk's sum begins while the rank's other chunk has activations": Found(
        "convolutions",
        "schedule=v_min parallelism.pipeline=2 parallelism.data=2 model.kwargs.layers=8 data.batch_size=14"
        " compression=randomk",
    ),
    "tables of 8-bit moments are not there for small tensors": Found(
        "buffers", "parallelism.pipeline=4 optimizer=adam8bit"
    ),
    "averaged weights are whole on every replica, whose states are shared out": Found(
        "skips",
        "schedule=hanayo parallelism.pipeline=2 parallelism.data=2 schedule.microbatches=2 zero.stage=1"
        " trainer.ema_decay=0.9",
    ),
    "a step that the loss scale skips has no gradients": Found(
        "shared", "schedule=gpipe parallelism.pipeline=2 data.batch_size=1 precision=fp16_mixed"
    ),
    "a step that one rank's gradients skip leaves another's out of the count of holders": Found(
        "tied",
        "schedule=interleaved_1f1b parallelism.pipeline=2 schedule.microbatches=2 precision=fp16_mixed"
        " trainer.freeze=[1.*]",
    ),
    "a rehearsal did not divide the tokens of layers that were given as modules": Found(
        "tied",
        "schedule=v_half parallelism.pipeline=2 schedule.microbatches=3 data.batch_size=3 parallelism.tensor=2"
        " parallelism.sequence=true",
    ),
}

_KEPT = "must not keep outputs of operators that are changed in place"
REFUSED = {
    "torch's cell changes in place what its products gave, which were kept": (
        Found("recurrent", "activation_checkpoint=selective data.batch_size=8"),
        _KEPT,
    ),
    "so does a layer that is added to": (
        Found("mlp", "activation_checkpoint=selective parallelism.pipeline=2 data.batch_size=8"),
        _KEPT,
    ),
    "in bfloat16, a weight of two layers was taken for two": (
        Found(
            "tied",
            "schedule=pipedream parallelism.pipeline=2 schedule.microbatches=2 data.batch_size=4 precision=bf16",
        ),
        "must be synchronous where stages share a weight",
    ),
}
"""Requests that ran and went wrong, and are refused now."""


@pytest.mark.costly
@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str) -> None:
    assert check(FOUND[name].request).kind == "ran"


@pytest.mark.costly
@pytest.mark.parametrize("name", REFUSED)
def test_what_went_wrong_is_refused(name: str) -> None:
    found, rule = REFUSED[name]
    made = check(found.request)
    assert made.kind == "refused"
    assert rule in made.told
