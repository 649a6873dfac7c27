"""The network in Lightning's Trainer, which resumes from its last checkpoint (`ckpt_path="last"`).

ModelCheckpoint saves every few steps and its last state; OnExceptionCheckpoint saves on SIGTERM and on errors. The
loader is torchdata's StatefulDataLoader, whose place in the epoch Lightning stores, with torchdata's sampler: the one
that Lightning makes itself draws from torch's random state, and gives a resumed epoch another order.
"""

import os
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from pytorch_lightning.loggers import MLFlowLogger
from recording import LR, OUT, RECORDER, SEED, SETTINGS, network, save_final, training_images
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


class Classifier(pl.LightningModule):
    """The network with its loss and optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = network()

    def on_train_start(self) -> None:
        """Tell the recorder at which step the weights are."""
        RECORDER.step = self.trainer.global_step

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Return the loss."""
        images, labels, rows = batch
        RECORDER.see(rows)
        loss = F.cross_entropy(self.vit(images), labels)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), LR)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SETTINGS["steps"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


pl.seed_everything(SEED, workers=True)
model = Classifier()
images, rank = training_images(), int(os.environ["RANK"])
sampler = StatefulDistributedSampler(images, SETTINGS["workers"], rank, seed=SEED)
loader = StatefulDataLoader(images, SETTINGS["batch"] // SETTINGS["workers"], sampler=sampler)
trainer = pl.Trainer(
    accelerator="cpu",
    strategy="ddp" if SETTINGS["workers"] > 1 else "auto",
    devices=SETTINGS["workers"],
    max_epochs=SETTINGS["epochs"],
    logger=MLFlowLogger("faults", "faults", tracking_uri=os.environ["MLFLOW_TRACKING_URI"]),
    log_every_n_steps=1,
    callbacks=[
        ModelCheckpoint(OUT, every_n_train_steps=SETTINGS["save_every"], save_last=True),
        OnExceptionCheckpoint(OUT),
    ],
    use_distributed_sampler=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader, ckpt_path="last")
if trainer.is_global_zero and trainer.current_epoch == SETTINGS["epochs"]:  # its own end, with as many steps or fewer
    save_final(model.vit.state_dict())
