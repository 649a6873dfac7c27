"""The network in Composer's Trainer with `autoresume`, on a StreamingDataset, which resumes within an epoch."""

import os
from io import BytesIO
from typing import Any

import torch
import torch.nn.functional as F
from composer import ComposerModel, Trainer
from composer.loggers import MLFlowLogger
from composer.optim import CosineAnnealingScheduler
from composer.utils import dist, reproducibility
from PIL import Image
from recording import AUGMENT, DATA, LR, OUT, RECORDER, SEED, SETTINGS, network, save_final
from streaming import StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory


class Images(StreamingDataset):
    """The training images."""

    def __getitem__(self, at: Any) -> Any:
        """Return an image, its label and its row."""
        sample = super().__getitem__(at)
        with Image.open(BytesIO(sample["image"])) as image:
            return AUGMENT(image.convert("RGB")), sample["label"], sample["row"]


class Classifier(ComposerModel):
    """The network with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = network()

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the logits."""
        RECORDER.see(batch[2])
        return self.vit(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the loss."""
        return F.cross_entropy(outputs, batch[1])


reproducibility.seed_all(SEED)
dist.initialize_dist("cpu")
clean_stale_shared_memory()  # of killed workers; every worker calls it, since it waits for all
share = SETTINGS["batch"] // SETTINGS["workers"]
# With a fixed number of canonical nodes the order does not depend on the number of workers.
images = Images(local=str(DATA / "mds"), shuffle=True, shuffle_seed=SEED, batch_size=share, num_canonical_nodes=1)
model = Classifier()
trainer = Trainer(
    model=model,
    train_dataloader=StreamingDataLoader(images, batch_size=share),
    optimizers=torch.optim.AdamW(model.parameters(), LR),
    schedulers=CosineAnnealingScheduler(),
    max_duration=f"{SETTINGS['epochs']}ep",
    device="cpu",
    seed=SEED,
    run_name="faults",
    save_folder=str(OUT),
    save_interval=f"{SETTINGS['save_every']}ba",
    save_num_checkpoints_to_keep=3,
    autoresume=True,
    loggers=[MLFlowLogger("faults", tracking_uri=os.environ["MLFLOW_TRACKING_URI"], resume=True)],
    progress_bar=False,
)
RECORDER.step = trainer.state.timestamp.batch.value
trainer.fit()
if dist.get_global_rank() == 0 and trainer.state.timestamp.batch.value == SETTINGS["steps"]:
    save_final(model.vit.state_dict())
trainer.close()
