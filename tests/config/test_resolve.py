"""Overrides become a configuration, or every problem at once."""

# ruff: noqa: E501 - a row of a table stays in one line

from __future__ import annotations

import re
from pathlib import Path

import pytest
from covering import sampled

from runner.config.compose.groups import RECIPE, groups, options, shipped_conf
from runner.config.compose.resolve import DEFAULT_RECIPE, resolve, resolve_sweep
from runner.config.rules.sections import KNOWN_NAMES, rules
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.weights import WEIGHT_STRATEGIES
from runner.optim.catalogue.registry import COMPRESSORS, OPTIMIZERS

# What an option needs besides its name to be a right request.
COMPANY = {
    ("model", "custom"): ["model.target=mine:model"],
    ("data", "custom"): ["data.target=mine:data"],
    ("loss", "custom"): ["loss.target=mine:loss"],
    ("logger", "custom"): ["logger.target=mine:Logger"],
    ("schedule", "from_file"): ["schedule.file=mine.csv"],
    ("activation_checkpoint", "custom"): ["activation_checkpoint.target=mine:strategy"],
    **{
        ("activation_checkpoint", name): [f"activation_checkpoint.{each.key}={each.example}" for each in known.options]
        for name, known in STRATEGIES.items()
    },
    ("activation_checkpoint", "compile_budget"): ["compile=true", "activation_checkpoint.share=0.5"],
    ("zero", "3"): ["parallelism.pipeline=1"],
    ("offload", "optimizer_cpu"): ["zero.stage=1"],
    ("offload", "weights_l2l"): ["schedule=looped_bfs", "activation_checkpoint=full"],
    ("offload", "parameters_cpu"): ["zero.stage=3", "parallelism.pipeline=1"],
    ("offload", "nvme"): ["zero.stage=3", "offload.nvme_path=drive", "parallelism.pipeline=1"],
    ("optimizer", "cpu_adam"): ["zero.stage=2"],
    ("optimizer", "custom"): ["optimizer.target=user_code:optimizer"],
    **{("compression", name): ["parallelism.data=2"] for name in COMPRESSORS if name != "none"},
    **{("planner", name): ["parallelism=auto"] for name in KNOWN_NAMES["planner"]},
    ("partition", "manual"): ["partition.boundaries=[1]", "parallelism.pipeline=2"],
}
EVERY_OPTION = [(group, name) for group in groups() for name in options(group, (shipped_conf(),))]
SOME_OPTIONS = set(dict(reversed(EVERY_OPTION)).items())
"""The first of each group."""


def refused(*overrides: str, working_directory: Path | None = None) -> list[str]:
    """The lines that tell what is wrong."""
    with pytest.raises(RequestError) as caught:
        resolve(overrides, working_directory=working_directory)
    return [problem.line() for problem in caught.value.problems]


@pytest.mark.parametrize("option", sampled(EVERY_OPTION, *SOME_OPTIONS), ids="=".join)
def test_every_option_composes_and_keeps_the_rules(option: tuple[str, str]) -> None:
    group, name = option
    config = resolve([f"{group}={name}", *COMPANY.get((group, name), [])])
    if config.parallelism.name == "auto":  # which a plan replaces by the layout that it finds
        assert [problem.path for problem in rules(config)] == ["parallelism"]
        config.parallelism.name = "single"
        config.planner.name = "joint"
    assert rules(config) == []


def test_a_preset_of_zero_may_be_a_number_and_may_bring_an_offload() -> None:
    assert [resolve([f"zero={stage}", "model=mlp"]).zero.stage for stage in range(4)] == [0, 1, 2, 3]
    config = resolve(["zero=offload", "model=mlp"])
    assert (config.zero.stage, config.offload.optimizer) == (2, "cpu")
    assert resolve(["zero=offload", "offload=parameters_cpu", "model=mlp"]).offload.parameters == "cpu"


def test_names_known_to_the_rules_are_the_options() -> None:
    for group, known in KNOWN_NAMES.items():
        assert set(known) == set(options(group, (shipped_conf(),))), group


def test_every_option_says_what_it_is_and_takes_its_own_name() -> None:
    for group, name in EVERY_OPTION:
        text = (shipped_conf() / group / f"{name}.yaml").read_text(encoding="utf-8")
        assert text.startswith("# "), f"{group}/{name}"
        if group not in (RECIPE, "callbacks") and name != "dapple":  # those of callbacks are keys, several at once
            assert re.search(rf"^name: \"?{name}\"?$", text, re.MULTILINE), f"{group}/{name}"


def test_every_strategy_of_moves_has_an_option_that_asks_for_it() -> None:
    """``name`` names the option alone: without ``activations`` or ``weights`` it would move nothing."""
    asked: dict[str, set[str]] = {"activations": {"none"}, "weights": {"none"}}
    for name in options("offload", (shipped_conf(),)):
        section = resolve([f"offload={name}", "model=mlp"]).offload
        for key, found in asked.items():
            strategy: str = getattr(section, key)
            found.add(strategy)
            assert not name.startswith(f"{key}_") or name == f"{key}_{strategy}"
    assert asked["activations"] == {"none", "save_on_cpu", *OFFLOADS}
    assert asked["weights"] == {"none", *WEIGHT_STRATEGIES} - set(OFFLOADS)


def test_the_default_recipe_applies_when_model_data_and_recipe_are_unnamed() -> None:
    assert resolve([]).model.name == DEFAULT_RECIPE
    assert resolve(["trainer.max_steps=3", "schedule=gpipe"]).model.name == DEFAULT_RECIPE
    assert resolve(["model=gpt"]).model.name == "gpt"
    assert resolve(["data=random_regression"]).model.name == "gpt"
    assert resolve(["recipe=null"]).model.name == "gpt"


def test_without_a_recipe_the_defaults_are_the_documented_ones() -> None:
    config = resolve(["model=gpt"])
    assert (config.parallelism.pipeline, config.data.batch_size, config.schedule.microbatches) == (1, 32, 1)
    assert (config.optimizer.name, config.optimizer.lr, config.lr_scheduler.name) == ("adamw", 1e-3, "constant")
    assert (config.precision.name, config.trainer.grad_clip_norm, config.data.shuffle) == ("fp32", None, None)
    assert (config.seed, config.trainer.max_steps) == (0, 100)


def test_a_model_brings_its_companions_unless_they_are_named() -> None:
    config = resolve(["model=mlp"])
    assert (config.data.name, config.loss.name) == ("random_regression", "mse")
    config = resolve(["model=mlp", "loss=custom", "loss.target=mine:loss"])
    assert (config.data.name, config.loss.target) == ("random_regression", "mine:loss")
    own = ["optimizer.target=mine:Own", "model.target=mine:build", "data=random_regression"]
    assert [resolve([*own, *more]).optimizer.name for more in ([], ["optimizer=adamw"])] == ["custom", "adamw"]
    assert resolve(["model=mlp", "data=random_tokens"]).data.name == "random_tokens"


def test_a_target_names_the_custom_option() -> None:
    config = resolve(["model.target=mine:build", "data.target=mine:data"])
    assert (config.model.name, config.model.kwargs) == ("custom", {})
    assert (config.data.name, config.data.kwargs) == ("custom", {})
    assert (config.loss.name, config.optimizer.name) == ("auto", "auto"), "a LightningModule's own, if it is one"
    assert (config.loss.target, config.optimizer.lr) == ("runner.zoo.losses:cross_entropy", 1e-3), "if it is none"
    named = resolve(["model.target=mine:build", "data.target=mine:data", "loss=mse", "optimizer=sgd"])
    assert (named.loss.name, named.optimizer.name) == ("mse", "sgd")


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_arguments_of_a_function_are_free(plus: str) -> None:
    lines = ["model=gpt", f"{plus}model.kwargs.extra=3", f"{plus}data.kwargs.path='a, b'"]
    config = resolve(lines)
    assert config.model.kwargs["extra"] == 3
    assert config.model.kwargs["width"] == 128
    assert config.data.kwargs["path"] == "a, b"


def test_an_argument_can_be_taken_away() -> None:
    assert "dropout" not in resolve(["model=gpt", "~model.kwargs.dropout"]).model.kwargs
    assert refused("model=gpt", "~optimizer.lr") == ["~optimizer.lr = : only entries of kwargs can be taken away."]


def test_explicit_degrees_win_over_the_preset() -> None:
    config = resolve(["model=gpt", "parallelism.pipeline=4", "parallelism=pipeline_data"])
    assert (config.parallelism.pipeline, config.parallelism.data) == (4, 2)


def test_an_option_of_the_command_line_wins_over_the_recipe() -> None:
    assert resolve([]).parallelism.pipeline == 2
    assert resolve(["parallelism=single"]).parallelism.pipeline == 1
    assert resolve(["parallelism=single", "parallelism.pipeline=3"]).parallelism.pipeline == 3


@pytest.mark.parametrize("typed", ["run_dir=Jürgen/läufe", "run_dir=数据/运行 1", 'run_dir="läufe"'])
def test_letters_of_all_languages_need_no_quotes(typed: str) -> None:
    assert resolve(["model=mlp", typed]).run_dir == typed.partition("=")[2].strip('"')


def test_names_of_a_mapping_may_be_in_quotes() -> None:
    words = ["model=gpt", "parallelism.tensor=2"]
    asked = resolve([*words, """parallelism.sharding={"blocks.*.up": "column",'0': row}"""]).parallelism.sharding
    assert asked is not None
    assert {str(name): way for name, way in asked.items()} == {"blocks.*.up": "column", "0": "row"}


@pytest.mark.parametrize("typed", ["name=ä,ö", "name=[ä", "name=ä'"])
def test_letters_beside_signs_with_a_meaning_are_read_by_the_grammar(typed: str) -> None:
    with pytest.raises(RequestError, match="name"):
        resolve(["model=mlp", typed])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.batchsize=8", "data.batchsize = 8: there is no such key. Try data.batch_size=8."),
        ("+data.batchsize=8", "data.batchsize = 8: there is no such key. Try data.batch_size=8."),
        ("++trainer.max_step=8", "trainer.max_step = 8: there is no such key. Try trainer.max_steps=8."),
        ("microbatches=4", "microbatches = 4: there is no such key. Try schedule.microbatches=4."),
        ("checkpoint.resume=auto", "checkpoint.resume = auto: there is no such key. Try resume=auto."),
        ("modle=gpt", "modle = gpt: there is no such key. Try model=gpt."),
        ("+zzz=1", "zzz = 1: there is no such key. The help of a command lists the keys, e.g. runner train --help."),
        ("zero.qqq=1", "zero.qqq = 1: there is no such key. zero has name, stage, bucket_elements, config."),
        ("optimizer=adm", f"optimizer = adm: there is no such option. optimizer has {', '.join(sorted(OPTIMIZERS))}. Try optimizer=adam."),
        (
            "optimizer=zero_one_adam",
            "optimizer = zero_one_adam: it is called onebit_adam_refreshed. 0/1 Adam's local steps are not implemented. "
            "Try optimizer=onebit_adam_refreshed.",
        ),
        ("loss=mine:loss", "loss = mine:loss: a function of yours is no option. It is read by another key. Try loss=custom loss.target=mine:loss."),
        ("callbacks=mine:Say", "callbacks = mine:Say: a function of yours is no option. It is read by another key. Try callbacks.say.target=mine:Say."),
        ("callbacks.say=mine:Say", "callbacks.say = mine:Say: must be a section of keys. It is text. Try callbacks.say.target=mine:Say."),
        ("loss.weight=2", "loss.weight = 2: there is no such key. loss has name, target, kwargs; an argument of its target is loss.kwargs.weight."),
        ("precision=8", "precision = 8: there is no such option. precision has bf16, bf16_master, bf16_mixed, fp16, fp16_mixed, fp32, fp4_emulated, fp64."),
        ("schedule.microbatches=4.5", "schedule.microbatches = 4.5: must be a whole number. It is a fraction."),
        ("schedule.microbatches=four", "schedule.microbatches = four: must be a whole number. It is text."),
        ("seed=null", "seed = null: must be a whole number. It is null."),
        ("trainer.progress=1", "trainer.progress = 1: must be true or false. It is a whole number."),
        ("data.shuffle=no", "data.shuffle = no: must be true or false or null. It is text. Try data.shuffle=false."),
        ("optimizer.lr=1e-3,", "optimizer.lr = 1e-3,: the value cannot be read. A number has nothing after it. Try optimizer.lr=1e-3."),
        ("resume=true", "resume = true: must be auto, a checkpoint or null. Try resume=auto."),
        ("optimizer.lr=true", "optimizer.lr = true: must be a number. It is true or false."),
        ("schedule.chunks=a", "schedule.chunks = a: must be a whole number or null. It is text."),
        ("partition.boundaries=[1,a]", "partition.boundaries[1] = a: must be a whole number. It is text."),
        ("partition.boundaries=3", "partition.boundaries = 3: must be a list, each entry a whole number. It is a whole number. Try partition.boundaries=[3]."),
        ("parallelism.devices=64", "parallelism.devices = 64: must be a list, each entry text. It is a whole number. Try parallelism.ranks=64."),
        ("schedule.base=true", "schedule.base = true: must be text or null. It is true or false. Try schedule.base=gpipe."),
        ("schedule.shares=2", "schedule.shares = 2: must be a list, each entry a number. It is a whole number. Try schedule.shares=[1,1,2]."),
        ("kernels.substitutions=one_hot", "kernels.substitutions = one_hot: must be a list, each entry text. It is text. Try kernels.substitutions=[one_hot]."),
        ("kernels.substitutions=all", "kernels.substitutions = all: must be a list, each entry text. It is text. Try kernels.substitutions=[attention]."),
        ("model.kwargs=3", "model.kwargs = 3: must be a mapping of names to values. It is a whole number; an entry is set by model.kwargs.NAME=VALUE."),
        ("data.shuffle=yes please", "data.shuffle = yes please: must be true or false or null. It is text."),
        ("seed=1,2", "seed = 1,2: several values make a sweep. A plain command runs one job. Try seed=1,2 -m."),
        ("hydra.run.dir=x", "hydra.run.dir = x: Hydra's own settings are not used. The runner starts, names and places its runs itself. Try run_dir=x."),
        ("optimizer@x=adam", "optimizer@x = adam: packages cannot be renamed. Every option has one place in a request. Try optimizer=adam."),
        ("seed", "argument = seed: an override is KEY=VALUE."),
        ("--sed", "argument = --sed: there is no such flag here."),
        ("name=(", "name = (: the value cannot be read."),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_fix(override: str, line: str) -> None:
    (found,) = refused("model=gpt", override)
    assert found.startswith(line)


def test_all_mistakes_are_told_at_once() -> None:
    lines = refused("modle=gpt", "+data.batchsize=8", "optimizer=adm", "seed=a", "optimizer=sgd", "optimizer=adam")
    assert [line.partition(" ")[0] for line in lines] == ["modle", "data.batchsize", "optimizer", "seed", "optimizer"]
    assert lines[-1] == "optimizer = adam: it is chosen twice, also sgd. Try optimizer=adam."
    (line,) = refused("model=gpt", "schedule=zb_h1", "schedule=zbh1")
    assert line == "schedule = zbh1: it is chosen twice, also zb_h1. Try schedule=zb_h1."


def test_values_keep_their_types() -> None:
    config = resolve(
        ["model=gpt", "memory_limit=8000000000", "optimizer.lr=1", "cost.F=2", "partition.boundaries=[1,2]"]
    )
    assert config.memory_limit == "8000000000"
    assert isinstance(config.optimizer.lr, float)
    assert isinstance(config.cost.F, float)
    assert config.partition.boundaries == [1, 2]
    assert isinstance(config, RunConfig)


def test_a_section_can_be_given_as_a_mapping() -> None:
    config = resolve(["model=gpt", "optimizer={lr: 0.5, weight_decay: 0.1}"])
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.name) == (0.5, 0.1, "adamw")
    assert refused("optimizer={lrr: 1}") == ["optimizer.lrr = 1: there is no such key. Try optimizer.lr=1."]


def test_interpolations_are_followed() -> None:
    assert (
        resolve(
            ["model=gpt", "trainer.max_steps=7", "lr_scheduler.total_steps=${trainer.max_steps}"]
        ).lr_scheduler.total_steps
        == 7
    )
    (line,) = refused("model=gpt", "seed=${nowhere}")
    assert "nowhere" in line


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["seed=range(100000000)"], 10**8),
        (["seed=range(0,100000)", "optimizer.lr=range(0.0,1.0,0.001)"], 10**8),
        (["seed=range(1001)"], 1001),
        (["seed=" + ",".join(map(str, range(40))), "schedule.microbatches=range(1,27)"], 1040),
        (["seed=range(10,0,-1)", "trainer.max_steps=range(1,11)", "sweep_most=99"], 100),
    ],
)
def test_a_sweep_of_too_many_jobs_is_counted_not_listed(words: list[str], count: int) -> None:
    with pytest.raises(RequestError) as refused:
        resolve_sweep(["model=gpt", *words])
    (problem,) = refused.value.problems
    assert problem.line().startswith(f"-m = {count} jobs: must be at most sweep_most = ")
    assert problem.line().endswith(f"Try sweep_most={count}.")
    if count < 1000:
        assert len(resolve_sweep(["model=gpt", *words[:2], f"sweep_most={count}"])) == count


def test_a_recipes_sweep_counts(tmp_path: Path) -> None:
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    values = list(range(40))
    text = f"# @package _global_\n# Mine.\nsweep_most: 1600\nsweep: {{seed: {values}}}\n"
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text(text, encoding="utf-8")
    words = ["recipe=mine", "trainer.max_steps=range(1,41)"]
    assert len(resolve_sweep(words, working_directory=tmp_path)) == 1600
    with pytest.raises(RequestError, match="-m = 1640 jobs: must be at most sweep_most = 1600"):
        resolve_sweep([words[0], "trainer.max_steps=range(1,42)"], working_directory=tmp_path)


@pytest.mark.parametrize("values", ["range(0,5,0)", "range(5,0)", "range(0,5,-1)"])
def test_a_range_that_has_no_values(values: str) -> None:
    with pytest.raises(RequestError):
        resolve_sweep(["model=gpt", f"seed={values}"])


def test_a_sweep_is_the_product_of_its_values() -> None:
    assert resolve_sweep(["model=gpt", "schedule=gpipe,1f1b", "seed=range(0,2)"]) == [
        ["model=gpt", "schedule=gpipe", "seed=0"],
        ["model=gpt", "schedule=gpipe", "seed=1"],
        ["model=gpt", "schedule=1f1b", "seed=0"],
        ["model=gpt", "schedule=1f1b", "seed=1"],
    ]
    assert resolve_sweep(["optimizer=glob(adam)"]) == [["optimizer=adam"]]
    assert resolve_sweep(["optimizer=glob(ada*w)"]) == [["optimizer=adamw"]]
    assert resolve_sweep(["name=choice(a,b)", "seed=[1,2]"]) == [["name=a", "seed=[1,2]"], ["name=b", "seed=[1,2]"]]
    assert resolve_sweep(["+model.kwargs.x=1,2"]) == [["+model.kwargs.x=1"], ["+model.kwargs.x=2"]]


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("seed=interval(0,1)", "this sweep cannot be listed"),
        ("optimizer=glob(zz*)", "nothing matches, so that there is no job"),
        ("seed=1,", "the value cannot be read"),
    ],
)
def test_a_sweep_that_cannot_be_listed(override: str, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        resolve_sweep([override])
