"""The network in the Trainer of Hugging Face transformers, which resumes from the last checkpoint of its folder.

Saves on SIGTERM (`enable_jit_checkpoint`); skips the images of finished steps (`ignore_data_skip=False`).
"""

from typing import Any

import torch.nn.functional as F
from recording import LR, OUT, RECORDER, SEED, SETTINGS, network, save_final, training_images
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Classifier(nn.Module):
    """The network with its loss, as the Trainer calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = network()

    def forward(self, images: Tensor, labels: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Return loss and logits."""
        RECORDER.see(rows)
        logits = self.vit(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Rows:
    """The images as the rows that the Trainer's collator wants."""

    def __init__(self) -> None:
        self.images = training_images()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(zip(("images", "labels", "rows"), self.images[index], strict=True))


class Start(TrainerCallback):
    """Tells the recorder at which step the weights are."""

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Note the step."""
        RECORDER.step = state.global_step


set_seed(SEED)
arguments = TrainingArguments(
    output_dir=str(OUT),
    run_name="faults",
    seed=SEED,
    per_device_train_batch_size=SETTINGS["batch"] // SETTINGS["workers"],
    num_train_epochs=SETTINGS["epochs"],
    learning_rate=LR,
    lr_scheduler_type="cosine",
    optim="adamw_torch",
    save_strategy="steps",
    save_steps=SETTINGS["save_every"],
    save_total_limit=3,
    enable_jit_checkpoint=True,
    ignore_data_skip=False,
    logging_steps=1,
    report_to=["mlflow"],
    use_cpu=True,
    disable_tqdm=True,
    remove_unused_columns=False,
    ddp_find_unused_parameters=False,
)
model = Classifier()
trainer = Trainer(model, arguments, train_dataset=Rows(), callbacks=[Start()])
trainer.train(resume_from_checkpoint=get_last_checkpoint(str(OUT)))
if trainer.is_world_process_zero() and trainer.state.global_step == trainer.state.max_steps:
    save_final(model.vit.state_dict())
