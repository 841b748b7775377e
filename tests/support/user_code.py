"""A model, a dataset and a loss as a user writes them: plain PyTorch, nothing of the runner.

Its text is also what the tests write into a user's own directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule


def model(width: int = 12, dropout: float = 0.0, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, width),
        nn.ReLU(inplace=inplace),
        nn.LayerNorm(width),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 5),
    )


class Listed(nn.Module):
    """Its layers are modules of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(12, 5)

    def layers(self) -> list[Callable[..., Any]]:
        return [self.embed, *self.blocks, self.head]

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers():
            x = layer(x)
        return x


class Lazy(nn.Module):
    """Its layers are made by the rank that holds them."""

    def layers(self) -> list[Callable[..., Any]]:
        return [lambda: nn.Linear(6, 12), lambda: nn.GELU(), lambda: nn.Linear(12, 12), lambda: nn.Linear(12, 5)]


def normed() -> nn.Sequential:
    """Keeps running averages of its inputs."""
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 5))


def with_weight_norm() -> nn.Sequential:
    """Its second layer makes its weight in a hook."""
    hooked = nn.utils.weight_norm(nn.Linear(12, 12))
    return nn.Sequential(nn.Linear(6, 12), hooked, nn.Tanh(), nn.Linear(12, 5))


def tied() -> nn.Sequential:
    """Its second and its last layer share their weight."""
    layers = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 5))
    layers[3].weight = layers[1].weight
    return layers


class Breaks(nn.Module):
    """Works in a profile and in a rehearsal, and does ``what`` from the given training call on."""

    def __init__(self, what: str, calls: int) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.what, self.calls = what, calls

    def forward(self, x: torch.Tensor) -> Any:
        self.calls -= int(self.training and torch.is_grad_enabled())
        if self.calls >= 0:
            return self.linear(x)
        if self.what == "raises":
            raise ValueError("the layer is broken")
        return {"none": None, "short": x[:, :7], "infinite": self.linear(x) * float("nan")}[self.what]


def breaking(what: str, calls: int = 78) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), Breaks(what, calls), nn.Tanh(), nn.Linear(12, 5))


def points(samples: int = 24, validation: int = 10) -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples + validation, 6, generator=generator)
    y = torch.randint(0, 5, (samples + validation,), generator=generator)
    return TensorDataset(x[:samples], y[:samples]), TensorDataset(x[samples:], y[samples:])


class Raising(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 33:
            raise ValueError("sample 33 is broken")
        return torch.zeros(6), torch.tensor(1)


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Class 0 does not count."""
    counts = (target > 0).float()
    return (F.cross_entropy(output, target, reduction="none") * counts).sum(), counts.sum()


def per_sample(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction="none")


def lightning_data() -> LightningDataModule:
    """A LightningDataModule around the same samples; its own batch size does not count."""
    from lightning.pytorch import LightningDataModule
    from torch.utils.data import DataLoader

    class Points(LightningDataModule):
        def setup(self, stage: str) -> None:
            self.train, self.validation = points()

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.train, batch_size=3)

        def val_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.validation, batch_size=3)

    return Points()


class Passing(IterableDataset[Any]):
    """The items of a list, in order; given workers, each would give a part."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        yield from self.items if info is None else self.items[info.id :: info.num_workers]


def passing(samples: int = 29, validation: int = 10) -> tuple[Passing, Passing]:
    first, second = (Passing([data[i] for i in range(len(data))]) for data in points(samples, validation))
    return first, second


class PassingOnce(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __iter__(self) -> PassingOnce:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(6), torch.tensor(1)


def sentences(count: int = 29) -> list[dict[str, list[int]]]:
    """Dicts with a list of words of its own length, and what each word is followed by."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    words = [torch.randint(1, 20, (length + 1,), generator=generator).tolist() for length in lengths]
    return [{"words": line[:-1], "next": line[1:]} for line in words]


def passing_sentences() -> Passing:
    return Passing(sentences())


def padded(samples: list[dict[str, list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """To the longest of them; the padding of the targets is -100."""
    longest = max(len(sample["words"]) for sample in samples)
    words = torch.tensor([sample["words"] + [0] * (longest - len(sample["words"])) for sample in samples])
    following = torch.tensor([sample["next"] + [-100] * (longest - len(sample["next"])) for sample in samples])
    return words, following


def reader() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(20, 12), nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 20))


def each_word(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the words that are there."""
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
    return total, (target != -100).sum()


# What a user gets wrong


def raising() -> None:
    raise ValueError("the vocabulary is not there")


def leaving() -> None:
    raise SystemExit(3)


def nothing(*_: object) -> None:
    return None


def number() -> int:
    return 3


def empty_sequential() -> nn.Sequential:
    return nn.Sequential()


def frozen() -> nn.Sequential:
    return model().requires_grad_(False)


class Gives(nn.Module):
    """Its output is what it was given, whatever its input."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: torch.Tensor) -> object:
        return self.output


def giving_none() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), Gives(None))


def giving_text() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), Gives("hello"), nn.Linear(12, 5))


def giving_an_object() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), Gives(object()), nn.Linear(12, 5))


class ListsNumbers(nn.Module):
    def layers(self) -> list[Callable[..., Any] | int]:
        return [nn.Linear(6, 5), 3]


class ListsNothing(nn.Module):
    def layers(self) -> list[Callable[..., Any]]:
        return []


class Items(Dataset[Any]):
    """``count`` samples, all alike but for the one that is not."""

    def __init__(self, count: int = 40, wrong_at: int = -1, wrong: str = "none") -> None:
        self.count, self.wrong_at, self.wrong = count, wrong_at, wrong

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> object:
        if index != self.wrong_at:
            return torch.zeros(6), torch.tensor(1)
        if self.wrong == "raises":
            raise ValueError(f"sample {index} is broken")
        if self.wrong == "exits":
            import os

            os._exit(9)
        return {"text": "hello", "none": None, "short": (torch.zeros(5), torch.tensor(1))}[self.wrong]


def triples() -> TensorDataset:
    return TensorDataset(torch.randn(24, 6), torch.randn(24, 6), torch.randn(24))


def dicts() -> list[dict[str, torch.Tensor | int]]:
    return [{"x": torch.zeros(6), "y": 1}] * 24


def empty_stream() -> Passing:
    return Passing([])


def texts() -> list[tuple[str, int]]:
    return [("hello", 1)] * 24


def loss_text(output: torch.Tensor, target: torch.Tensor) -> str:
    return "hello"


def loss_number(output: torch.Tensor, target: torch.Tensor) -> float:
    return 1.0


def loss_raising(output: torch.Tensor, target: torch.Tensor) -> None:
    raise ValueError("the loss is broken")


def loss_detached(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target).detach()


def loss_nan(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target) * float("nan")


def collate_one(samples: list[object]) -> torch.Tensor:
    return torch.zeros(len(samples), 6)


def collate_short(samples: list[object]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 6), torch.zeros(1)


def collate_raising(samples: list[object]) -> None:
    raise KeyError("words")


def report_raising(run_dir: Path, weights: dict[str, torch.Tensor], config: object) -> None:
    raise ValueError("the report is broken")


def sampled_data() -> LightningDataModule:
    """A LightningDataModule whose loader draws its samples by weights."""
    from lightning.pytorch import LightningDataModule
    from torch.utils.data import DataLoader, WeightedRandomSampler

    class Sampled(LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(points()[0], sampler=WeightedRandomSampler([1.0] * 24, 24))

    return Sampled()


def collated_data() -> LightningDataModule:
    """A LightningDataModule without validation whose loader has a collate function."""
    from lightning.pytorch import LightningDataModule
    from torch.utils.data import DataLoader

    class Collated(LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(sentences(), collate_fn=padded)  # type: ignore[arg-type]  # a list is a dataset to it too

    return Collated()


class Waits(nn.Module):
    """On rank 1 it leaves a file ``waiting`` and stays where it is, once the run has come to a phase of its life."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.phase, self.passes = phase, 0

    def forward(self, x: torch.Tensor) -> Any:
        self.passes += self.training
        now = (
            ("validation" if self.passes else "trial")
            if not self.training
            else "rehearsal"
            if self.passes < 3
            else "step"
        )
        if now == self.phase and (now != "step" or self.passes > 40):
            self.wait()
        return self.linear(x)

    def _save_to_state_dict(self, *args: Any) -> None:
        if self.phase == "save" and self.passes:
            self.wait()
        super()._save_to_state_dict(*args)

    def wait(self) -> None:
        import os
        import pathlib
        import time

        if os.environ.get("RANK") == "1":
            pathlib.Path("waiting").write_text(str(os.getpid()))
            time.sleep(600)


def waiting(phase: str) -> nn.Sequential:
    layer = Waits(phase)
    if phase == "import":
        layer.wait()
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), layer, nn.Linear(12, 5))
