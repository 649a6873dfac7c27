"""torchrun --nproc-per-node 2 experiments/loops/with_lightning.py DATASET FOLDER: Lightning's Trainer, resumed."""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy

from vitray import Loader, Model, ViT

dataset, folder = sys.argv[1:]
torch.manual_seed(0)  # of the first weights
vit = ViT(Model(name="vit_u6x1_8", image_size=32, num_classes=10))


class Classifier(lightning.LightningModule):
    def train_dataloader(self):  # Lightning stores its state, too
        return Loader(dataset, batch=32, size=32, augment="three_augment")

    def training_step(self, batch, _):
        return cross_entropy(self.vit(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


classifier = Classifier()
classifier.vit = vit
saving = ModelCheckpoint(folder, every_n_train_steps=16, save_last=True)
where = {"accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "max_epochs": 3, "logger": False}
lightning.Trainer(callbacks=[saving], **where).fit(classifier, ckpt_path="last")
