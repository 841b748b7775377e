"""The pipeline from a user's own script, with Lightning's own Trainer::

    class Model(pl.LightningModule):
        def layers(self):                      # modules in order, or callables that make them
            return [lambda: nn.Linear(8, 32), nn.ReLU, lambda: nn.Linear(32, 4)]

        def loss(self, output, target):        # a mean over its samples, or (sum, weight)
            return nn.functional.cross_entropy(output, target)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    strategy = PipelineStrategy(stages=2, schedule="1f1b", microbatches=4)
    pl.Trainer(strategy=strategy, devices=2, accelerator="cpu", max_epochs=3).fit(Model(), loader)

Start it with ``python`` or ``torchrun``. :class:`ZeroStrategy` is the same with DeepSpeed's ZeRO and offload. See
docs/lightning.md.
"""

from runner.api.pipeline import PipelineStrategy
from runner.api.zero import ZeroStrategy
from runner.config.schema import OffloadConfig, ZeroConfig
from runner.training.averaging import WeightAveraging

__all__ = ["OffloadConfig", "PipelineStrategy", "WeightAveraging", "ZeroConfig", "ZeroStrategy"]
