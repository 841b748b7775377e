"""The table of commands with their descriptions. Importing this module imports nothing large."""

from __future__ import annotations

from runner.cli.arguments import Command, Flag

__all__ = ["COMMANDS"]

_JSON = Flag("--json", "print one JSON document on standard output and nothing else there")
_CFG = Flag("--cfg", "print the resolved request, and which file or override set each key; starts nothing", "job", "-c")
_SWEEP = Flag("--multirun", "one job per combination of KEY=A,B  KEY=range(1,5)  GROUP=glob(*)", short="-m")

_TRAIN = Command(
    name="train",
    summary="train a model; without overrides the default recipe, recipe=rudalle_tiny",
    usage="[KEY=VALUE ...] [-m]",
    about=(
        "Resolves and checks the request, predicts its step time, bubble and memory, starts one process per rank on "
        "this machine and trains. The run's directory, outputs/<name>/<time> unless run_dir says otherwise, holds "
        "record.json with the predictions beside the measurements. A wrong request writes nothing."
    ),
    examples=(
        ("runner train", "the default recipe: a ruDALL-E-style model on emoji in two stages"),
        ("runner train model=gpt parallelism.pipeline=2 schedule.microbatches=4", "a small GPT in a pipeline"),
        ("runner train run_dir=outputs/long checkpoint.every=100 resume=auto", "continues when it is started again"),
        ("runner train model.target=mine:net data.target=mine:data loss.target=mine:loss", "your own functions"),
        ("runner train -m model=gpt parallelism.pipeline=1,2 schedule=gpipe,1f1b", "a sweep of four jobs"),
    ),
    flags=(_SWEEP, _CFG),
)
_PLAN = Command(
    name="plan",
    summary="check a request, cut the model into stages and predict time and memory; starts nothing",
    usage=(
        "[KEY=VALUE ...] [-m] [--json] [--svg FILE] [--write FILE] [--planners all] [--from RUN_DIR] [--rehearse] "
        "[--why] [--rules]"
    ),
    about=(
        "Prints the stages, the predicted step time, bubble and peak memory of every rank with its parts, and how "
        "many samples or tokens that is per second. Ends with status 3 where a rank needs more than memory_limit. Any "
        "number of ranks can be planned for on any machine. -m prints one table of all jobs, the fastest that fits on "
        "top. --why adds what speaks for the layout, the rules that bind what you named to other keys, each with its "
        "reason and source, and DeepSpeed's configuration where it is used; with -m also the whole plan of each job. "
        "--rules prints every rule by group and plans nothing. Where a policy chooses under memory_limit what is run "
        "forward again, --svg draws what a stage takes under other budgets, by strategy. With parallelism=auto it "
        "finds the layout, schedule, cut, recomputation and ZeRO with the shortest step that fits, says why and what "
        "else there is, and prints the command that asks for it; what you name yourself is kept. --from takes the "
        "request of a run, changed by the words that you give, and says what that run's measured steps let expect. "
        "--rehearse plays the run's first steps on tensors without memory, and gives the peaks that it has counted."
    ),
    examples=(
        ("runner plan model=gpt parallelism.pipeline=4 schedule.microbatches=8", "four stages on this machine"),
        ("runner plan recipe=rudalle_malevich hardware=a100_80gb", "the full-size model on machines you do not have"),
        ("runner plan model=gpt parallelism=auto parallelism.ranks=8 hardware=a100_80gb", "the layout is found"),
        ("runner plan -m model=gpt parallelism.pipeline=1,2,4", "one table of three plans; --json for a script"),
    ),
    flags=(
        _SWEEP,
        _CFG,
        _JSON,
        Flag(
            "--why",
            "also say why this layout, and which rules looked at what you named, with their reasons and sources",
        ),
        Flag("--rules", "print all rules by group, and no plan; with --json a list"),
        Flag("--svg", "write a picture of time against memory for activations, by strategy", "FILE"),
        Flag("--planners", "all: what each planner of parallelism=auto makes of the request, judged alike", "NAME"),
        Flag(
            "--from", "project a run's measured steps to its request with other words, another layout, say", "RUN_DIR"
        ),
        Flag("--rehearse", "count each rank's peak in steps on tensors without memory, to the byte"),
        Flag("--write", "with parallelism=auto: write the layout that was found as a recipe", "FILE"),
    ),
)
_SCHEDULE = Command(
    name="schedule",
    summary="draw the order of a pipeline's work, with its bubble and its activations",
    usage="[KEY=VALUE ...] [--json] [--csv FILE] [--svg FILE] [--trace FILE] [--list]",
    about=(
        "Prints one line per rank over time: digits are forwards and letters backwards of a micro-batch, dots idle. "
        "In the files 0F3 is the forward of stage 0 on micro-batch 3, and 0B3 its backward. Costs are cost.F, cost.B, "
        "cost.I, cost.W and cost.comm, in any unit. Several values of a key draw several schedules on one time scale. "
        "It needs no model and answers at once."
    ),
    examples=(
        ("runner schedule schedule=1f1b parallelism.pipeline=4 schedule.microbatches=8", "a text grid"),
        ("runner schedule schedule=gpipe parallelism.pipeline=4 schedule.microbatches=8 --svg gpipe.svg", "a picture"),
        ("runner schedule schedule=gpipe,1f1b parallelism.pipeline=4 schedule.microbatches=8", "two on one time scale"),
        (
            "runner schedule schedule=from_file schedule.file=my.csv parallelism.pipeline=2 schedule.microbatches=4",
            "an order of your own, checked",
        ),
    ),
    flags=(
        _CFG,
        _JSON,
        Flag("--csv", "write the actions in torch's schedule CSV", "FILE"),
        Flag("--svg", "write a picture", "FILE"),
        Flag("--trace", "write a Chrome trace for chrome://tracing or Perfetto", "FILE"),
        Flag("--list", "list the schedules with their constraints, formulas and sources; with --json for a script"),
    ),
    sections=("parallelism", "schedule", "cost"),
)
_REPORT = Command(
    name="report",
    summary="tables and figures of a run or a sweep, or of several side by side",
    usage="DIR [DIR ...] [--sort COLUMN] [--allow NAMES] [--json]",
    about=(
        "Reads the record.json of a run's directory, or of every job of a sweep's, prints the tables and writes the "
        "figures beside them; of several directories, or a folder of runs, what differs first. It reads records only, "
        "so that it works on any machine. Of the functions that records "
        "name as sweep_report, it calls only shipped ones and those that you allow."
    ),
    examples=(
        ("runner report outputs/run/2026-01-31_12-00-00", "one run"),
        ("runner report outputs/rates --sort val_loss", "a sweep, its best job first"),
        ("runner report outputs/first outputs/second", "two runs side by side"),
        ("runner report outputs", "all runs below a folder"),
    ),
    flags=(
        _JSON,
        Flag("--sort", "order the runs by a column of runs.csv: val_loss, val_NAME:max, optimizer.lr", "COLUMN"),
        Flag("--allow", "sweep_report functions that records may name, package.module:function, by commas", "NAMES"),
    ),
    sections=(),
)

_VERIFY = Command(
    name="verify",
    summary="train a few steps in a layout and in one process, and compare losses, gradients and weights",
    usage="[KEY=VALUE ...] [--steps N] [--json]",
    about=(
        "Starts the ranks that the request asks for, then one process with the same micro-batches in a plain loop, and "
        "compares every step. On the CPU, with one thread and up to two replicas, equal means the same bits; elsewhere "
        "equal up to the order of sums. Ends with status 4 at a difference and names its step and parameter. Nothing "
        "stays on disk."
    ),
    examples=(
        ("runner verify model=gpt parallelism.pipeline=2 schedule.microbatches=4", "a pipeline of two stages"),
        ("runner verify recipe=rudalle_tiny schedule=gpipe --steps 2 --json", "one JSON document for a script"),
    ),
    flags=(_CFG, _JSON, Flag("--steps", "optimizer steps of each, 4 unless told", "N")),
)
_EXPORT = Command(
    name="export",
    summary="write a run's whole weights into one safetensors file, or a folder of another library",
    usage="RUN_DIR FILE [--format NAME] [--dtype NAME] [--max-shard-size SIZE] [--best FIGURE] [--allow-pickle NAMES]",
    about=(
        "Takes the newest good checkpoint of a run, or a checkpoint's own path, whatever layout wrote it, and writes "
        "all parameters and buffers under the names they have in your model: model.load_state_dict(load_file(FILE)). "
        "Adapters are merged into the weights beside which they are. With --format huggingface FILE is a folder for "
        "from_pretrained, with the tokenizer of model.pretrained or of data=text; with --format peft a folder of PEFT "
        "with the adapter alone; with --format dcp one of torch's distributed checkpoints. model.pretrained=FILE "
        "starts a run from all but PEFT's. What was written is read back and compared before the command ends."
    ),
    examples=(
        ("runner export outputs/run/2026-01-31_12-00-00 model.safetensors", "the newest weights of a run"),
        ("runner export outputs/rates best.safetensors --best val_loss", "those of a sweep's best job"),
        ("runner export outputs/tuned tuned --format huggingface --dtype bf16", "a folder for from_pretrained"),
    ),
    flags=(
        Flag("--format", "safetensors (one file, the default), huggingface, peft or dcp (folders)", "NAME"),
        Flag("--dtype", "type of floating-point tensors: fp32, bf16 or fp16; the run's own unless told", "NAME"),
        Flag("--max-shard-size", "of one file of the format huggingface, 5GB unless told", "SIZE"),
        Flag("--best", "of a sweep, take the complete job with the lowest val_loss or loss, or val_NAME:max", "FIGURE"),
        Flag("--allow-pickle", "classes that a checkpoint may call, package.module:name, by commas", "NAMES"),
    ),
    sections=(),
)
_WEIGHTS = (
    Flag("--best", "the checkpoint with the lowest validation loss; the default where the run kept one"),
    Flag("--last", "the newest checkpoint, also where the run kept the best one"),
    Flag("--weights", "a checkpoint, or a safetensors file of runner export", "FILE"),
)
_EVALUATE = Command(
    name="evaluate",
    summary="measure loss and metrics of a run's weights, in any layout",
    usage="RUN_DIR [KEY=VALUE ...] [--best | --last | --weights FILE] [--set NAMES] [--out FILE] [--json]",
    about=(
        "Takes the run's request and its best checkpoint if it kept one, else its newest, and measures the loss and "
        "the metrics of the validation set and, if there is one, of the test set. Overrides choose another layout, "
        "further metrics or other data. The figures are printed, and written as JSON into evaluation.json of the run."
    ),
    examples=(
        ("runner evaluate outputs/run/2026-01-31_12-00-00", "the validation and the test set, in the run's layout"),
        ("runner evaluate outputs/long --last parallelism=single --set test --json", "in one process"),
    ),
    flags=(
        *_WEIGHTS,
        Flag("--set", "validation, test or train, by commas", "NAMES"),
        Flag("--out", "the JSON file to write", "FILE"),
        _JSON,
    ),
    sections=(),
)
_PREDICT = Command(
    name="predict",
    summary="write a run's outputs for all samples of a set into one file",
    usage="RUN_DIR FILE [KEY=VALUE ...] [--best | --last | --weights FILE] [--set NAME] [--json]",
    about=(
        "As evaluate, but writes the last layer's outputs in the order of the samples: a tensor named predictions "
        "(predictions.0, predictions.1, … for several) in a .safetensors file, or a .npy file. Without --set, of the "
        "test set or, if there is none, of the validation set."
    ),
    examples=(("runner predict outputs/long predictions.npy", "an array with a row for each sample"),),
    flags=(*_WEIGHTS, Flag("--set", "validation, test or train", "NAME"), _JSON),
    sections=(),
)
_DOCTOR = Command(
    name="doctor",
    summary="say what this machine can run, with a one-line fix for what it cannot",
    usage="[--build NAMES] [--collectives] [--json]",
    about=(
        "Looks at Python and the packages, cores, memory and its limit, GPUs, communication between two ranks, shared "
        "memory, ports, DeepSpeed and libaio, SLURM, submitit, mpirun, disk space and the default recipe's packages. "
        "Ends with status 1 where something that training needs is missing. --collectives keeps the link's latency and "
        "bandwidth, which plans with hardware=auto then count."
    ),
    examples=(
        ("runner doctor", "a table"),
        ("runner doctor --collectives", "and whether collectives are right, and how fast"),
        ("runner doctor --build async_io,cpu_adam", "and compile what offload=nvme and optimizer=cpu_adam need"),
    ),
    flags=(
        _JSON,
        Flag("--build", "also compile operators of DeepSpeed: async_io, cpu_adam, fused_adam, by commas", "NAMES"),
        Flag("--collectives", "also check and time collectives between ranks of this machine"),
    ),
    sections=(),
)

_COMPLETION = Command(
    name="completion",
    summary="complete commands, groups, options and keys in a shell",
    usage="SHELL",
    about=(
        "Prints the lines that switch completion on, for bash or zsh: put them into the file that your shell reads at "
        "its start. Options of your own conf/ are completed in the folder that holds it."
    ),
    examples=(("runner completion bash >> ~/.bashrc", "from the next shell on"),),
    sections=(),
)

COMMANDS: dict[str, Command] = {
    each.name: each
    for each in (
        _TRAIN,
        _PLAN,
        _SCHEDULE,
        _VERIFY,
        _EVALUATE,
        _PREDICT,
        _REPORT,
        _EXPORT,
        _DOCTOR,
        _COMPLETION,
    )
}
"""The commands, in the order of the help."""
