"""Everything that only a GPU can show: `pytest -m gpu`. Without one, every test is skipped.

Each test names in its docstring the branches of ``runner/`` for CUDA that it runs. Expectations are computed by plain
torch on the same device.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.cli.main import main
from runner.record import RunRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TINY = ("model=mlp", "device=cuda", "data.batch_size=8", "trainer.max_steps=6", "trainer.progress=false", "logger=csv")
GPT = (
    *("model=gpt", "device=cuda", "data.batch_size=8", "trainer.max_steps=6", "trainer.progress=false", "logger=none"),
    *(f"model.kwargs.{name}={value}" for name, value in {"layers": 4, "width": 256, "heads": 8}.items()),
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(name: str, *words: str) -> RunRecord:
    """A run by the command, in processes of its own."""
    line = [sys.executable, "-m", "runner", "train", f"run_dir={name}", *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return RunRecord.load(Path(name))


def test_a_run_is_that_of_the_cpu_to_rounding() -> None:
    """``model/device``, ``launch/rank`` (device, TF32 off), ``training/trainer``, ``strategy/pipeline.root_device``."""
    on_cpu = train("cpu", *TINY, "device=cpu")
    on_gpu = train("gpu", *TINY)
    assert on_gpu.loss == pytest.approx(on_cpu.loss, rel=1e-4)
    assert on_gpu.hardware["gpus"][0] == torch.cuda.get_device_name(0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains(precision: str) -> None:
    """Autocast, master weights and the loss scale on a device."""
    record = train("run", *GPT, f"precision={precision}")
    assert record.loss[-1] < record.loss[0]


def test_allocated_memory_is_as_predicted() -> None:
    """``engine/memory_meter`` (the allocator's peak), ``plan/memory``: never above, within 5 % of the peak."""
    record = train("run", *GPT, "data.batch_size=32")
    peaks = record.peak_memory_bytes
    assert peaks["kind"] == "cuda_allocated"
    assert peaks["measured"][0] <= peaks["predicted"][0] * 1.001
    assert peaks["measured"][0] >= peaks["predicted"][0] * 0.95


def test_a_steps_times_are_those_of_the_stream() -> None:
    """``engine/measure/clocks.CudaClock``: a kernel's time, and not that of its launch."""
    from runner.engine.measure.clocks import clock_of
    from runner.engine.measure.timeline import Timeline

    weight = torch.randn(4096, 4096, device="cuda")
    line = Timeline(clock_of(weight.device))
    for _ in range(2):
        line.begin(0)
        start = line.moment()
        begun = time.perf_counter()
        for _ in range(20):
            weight @ weight
        launched = time.perf_counter() - begun
        line.compute("F", 0, 0, start)
        line.finish()
        taken = time.perf_counter() - begun
    step = line.steps[-1]
    assert launched < step.compute <= taken
    assert step.end <= time.perf_counter()


def test_a_run_continues_with_the_same_bits() -> None:
    """``training/random_state``, ``model/seeds`` (CUDA's generators), checkpoints of a device's tensors."""
    dropout = "model.kwargs.dropout=0.1"
    whole = train("whole", *GPT, dropout, "checkpoint.every=3")
    again = train("again", *GPT, dropout, "resume=whole/checkpoints/step-3.ckpt")
    assert again.loss[3:] == pytest.approx(whole.loss[3:], rel=1e-6)


def test_ranks_that_share_the_device_compute_what_one_does() -> None:
    """``model/device.backend_of``, ``engine/transport/staged``, ``strategy/transports``, ``launch/local/ranks``."""
    one = train("one", *GPT, "schedule=1f1b", "schedule.microbatches=4")
    two = train("two", *GPT, "schedule=1f1b", "schedule.microbatches=4", "parallelism.pipeline=2")
    replicas = train("replicas", *GPT, "schedule.microbatches=2", "parallelism.data=2")
    assert two.loss == pytest.approx(one.loss, rel=1e-4)
    assert replicas.loss == pytest.approx(one.loss, rel=1e-4)
    assert two.bubble_ratio["measured"] > 0


def test_activations_go_to_the_host_and_come_back() -> None:
    """``memory/apply/install`` (pinned memory), ``engine/measure/timeline.moving`` in autograd's thread."""
    kept, moved = train("kept", *GPT), train("moved", *GPT, "offload=activations_save_on_cpu")
    assert moved.loss == kept.loss
    assert moved.peak_memory_bytes["measured"][0] < kept.peak_memory_bytes["measured"][0]
    assert moved.seconds["offload"] > kept.seconds["offload"] == 0


def test_compiled_layers_compute_the_same() -> None:
    """``model/compiled`` with Triton's kernels."""
    plain, compiled = train("plain", *GPT), train("compiled", *GPT, "compile=true")
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_on_one_device(stage: int) -> None:
    """``strategy/zero/stage`` (NCCL, accelerated settings), ``optim/kinds/deepspeed``."""
    record = train("run", *GPT, f"zero.stage={stage}", "optimizer=fused_adam")
    assert record.loss[-1] < record.loss[0]


@pytest.mark.parametrize("optimizer", ["adam8bit", "adam4bit", "adam_fp8"])
def test_states_of_few_bits(optimizer: str) -> None:
    """``optim/kinds/eight_bits`` and ``few_bits`` with their CUDA kernels."""
    record = train("run", *GPT, f"optimizer={optimizer}")
    assert record.loss[-1] < record.loss[0]


def test_dropout_draws_the_same_numbers_on_other_ranks() -> None:
    """``model/seeds``: CUDA's generator is seeded for each layer and micro-batch."""
    words = (*GPT, "model.kwargs.dropout=0.1", "schedule=1f1b", "schedule.microbatches=2")
    whole, cut = train("whole", *words), train("cut", *words, "parallelism.pipeline=2")
    assert cut.loss == pytest.approx(whole.loss, rel=1e-3)


def test_a_segment_carries_the_random_state_of_a_device() -> None:
    """``model/traced/segments``: from one segment of a traced model to the next."""
    from runner.model.traced import segments

    device = torch.device("cuda", torch.cuda.current_device())
    carried = segments._random_state(device)
    first = torch.rand(3, device=device)
    segments._set_random_state(carried)
    assert torch.equal(first, torch.rand(3, device=device))


def test_the_doctor_and_nvtx_know_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    """``launch/doctor``, ``environment``, ``profiler=nvtx``, ``profiling/cache`` and ``timing``."""
    main(["doctor", "--json"])
    assert torch.cuda.get_device_name(0) in capsys.readouterr().out
    train("run", *TINY, "profiler=nvtx")
    status = main(["plan", *TINY, "--json"])
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == 0
    assert plan["seconds_source"] == "measured"


def test_deepspeed_refuses_ranks_that_share_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    """``launch/run/prepare``: NCCL does."""
    if torch.cuda.device_count() > 1:
        pytest.skip("each of two ranks has a device here")
    assert main(["train", *GPT, "zero.stage=1", "parallelism.data=2", "run_dir=run"]) == 2
    assert "needs a GPU for each rank" in capsys.readouterr().err
