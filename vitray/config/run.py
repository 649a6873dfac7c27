"""`Run`: all settings of an experiment, as one frozen value."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from vitray.config.classification import Distillation, Finetune, Supervised
from vitray.config.evaluation import NEEDS, PROBE_TRAITS, Evaluate
from vitray.config.model import Model
from vitray.config.parsing import (
    apply_changes,
    dump_yaml,
    flatten,
    parse_overrides,
    place_of,
    read_recipe,
    recipe_path,
)
from vitray.config.pretraining import Masked, Tokenizer
from vitray.config.sections import Section, Seed, one_of
from vitray.config.self_supervised import Lejepa, SelfDistillation
from vitray.config.training import Checkpointing, Compute, Data, Guard, Optim, Tracking
from vitray.config.validation import explain_error

Task = Supervised | Finetune | Masked | Lejepa | SelfDistillation | Tokenizer


class Run(Section):
    """All settings of an experiment."""

    seed: Seed = 0
    """Seed of the initial weights, the order of images, augmentation and dropout."""
    model: Model = Model()
    task: Annotated[Task, Field(discriminator="kind"), one_of("supervised")] = Supervised()
    """The training task."""
    data: Data = Data()
    optim: Optim = Optim()
    compute: Compute = Compute()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpointing = Checkpointing()
    guard: Guard = Guard()
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def _task_fits(self) -> Self:
        self.task.check(self.model, self.data)
        traits = self.task.traits
        if self.data.views is not None and "views" not in traits.needs:
            raise ValueError(f"data.views does not apply to task {self.task.kind}, which takes one view of each image")
        if traits.network != "vit" and self.optim.ema is not None:
            raise ValueError(f"optim.ema: got an average with task {self.task.kind}, expected null: its teacher is one")
        if traits.joint and self.optim.batch < 2:
            raise ValueError(f"optim.batch: got 1, expected at least 2: task {self.task.kind} compares images")
        if traits.joint and self.compute.has_graphs:
            raise ValueError(
                f"compute.compile: got {self.compute.compile} with task {self.task.kind}, whose loss is no CUDA graph;"
                " expected default"
            )
        if traits.joint and self.compute.local_batch is not None:
            got = f"got {self.compute.local_batch} with task {self.task.kind}"
            raise ValueError(
                f"compute.local_batch: {got}, expected null: its loss is of the whole batch;"
                " compute.activation_checkpointing=blocks saves memory"
            )
        return self

    @model_validator(mode="after")
    def _network_fits(self) -> Self:
        if self.optim.rule.kind == "muon":
            self.model.require_vit("optim.rule: muon")
        if self.optim.layer_decay != 1:
            self.model.require_vit(f"optim.layer_decay: {self.optim.layer_decay:g}")
        if self.compute.activation_checkpointing != "none":
            self.model.require_vit(f"compute.activation_checkpointing: {self.compute.activation_checkpointing}")
        for name in self.evaluate.probes:
            if PROBE_TRAITS[name].reads == "attention":
                self.model.require_vit(f"evaluate.probes: {name}")
        if self.evaluate.figures:
            self.model.require_vit("evaluate.figures")
        return self

    @model_validator(mode="after")
    def _several_labels_fit(self) -> Self:
        weights = self.classification.class_weights if self.classification else "none"
        lists = {"thresholds": self.thresholds, "class_weights": weights if isinstance(weights, tuple) else None}
        for name, values in lists.items():
            has_number = "num_classes" in self.model.model_fields_set  # else the dataset sets it
            if values is not None and has_number and len(values) != (classes := self.model.num_classes or 0):
                raise ValueError(f"task.{name}: got {len(values)}, expected one for each of {classes} classes")
        return self

    @model_validator(mode="after")
    def _classes_balance(self) -> Self:
        if self.data.balance != "none" and self.classification is None:
            raise ValueError(f"data.balance does not apply to task {self.task.kind}, expected one that learns classes")
        return self

    @model_validator(mode="after")
    def _early_images_fit(self) -> Self:
        if self.data.early is None:
            return self
        self.model.require_vit("data.early")
        if self.classification is None:
            raise ValueError(f"data.early does not apply to task {self.task.kind}, expected one that learns classes")
        if self.model.patches:
            raise ValueError("data.early and model.patches cannot be combined: each changes the patches of a step")
        if self.model.positions.kind == "relative":
            raise ValueError("data.early needs positions of any grid, and relative positions are those of one")
        small, full, patch = self.early_shape or (0, 0), self.model.image_shape, self.model.shape.patch
        if small == full or small[0] > full[0] or small[1] > full[1] or small[0] % patch or small[1] % patch:
            raise ValueError(
                f"data.early.size: got {small[0]} x {small[1]}, expected multiples of the patch, {patch}, less than"
                f" model.image_size, {full[0]} x {full[1]}"
            )
        return self

    @model_validator(mode="after")
    def _submodels_differ(self) -> Self:
        if self.submodels == 1:
            return self
        model = self.model
        model.require_vit("task.cosub")
        reason = "the two submodels differ by their draws of drop path"
        if not model.drop_path:
            raise ValueError(f"task.cosub needs model.drop_path > 0, because {reason}")
        if model.drop_path_schedule == "linear" and model.shape.depth == 1:
            raise ValueError(f"task.cosub needs drop path in some block, where linear is 0 in the only one: {reason}")
        if self.distill is not None:
            raise ValueError("task.cosub and task.distill cannot be combined: each divides the loss with the labels")
        return self

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        # torch.compile keeps 8 graphs of a function, and computes further ones without compiling.
        if self.compute.compile and len(self.model.patches) > 8:
            got = f"{self.compute.compile} with {len(self.model.patches)} model.patches"
            raise ValueError(f"compute.compile: got {got}, expected at most 8")
        return self

    @model_validator(mode="after")
    def _probes_fit(self) -> Self:
        probes, kind, traits = self.evaluate.probes, self.task.kind, self.task.traits
        if probes and traits.saves == "tokenizer":
            raise ValueError(f"evaluate.probes does not apply to task {kind}: probes score features, and it has codes")
        if probes and self.data.evaluated is None:
            raise ValueError("evaluate.probes needs data.val or data.holdout, because it scores at each evaluation")
        by_logits = [name for name in probes if PROBE_TRAITS[name].reads == "logits"]
        if by_logits and self.model.num_classes is None:
            raise ValueError(f"evaluate.probes {by_logits[0]} needs a head, because it compares logits with labels")
        if self.guard.on_collapse == "stop" and not traits.may_collapse:
            raise ValueError(
                f"guard.on_collapse: got stop with task {kind}, expected warn: stop is for tasks without labels"
            )
        watched = [("knn", self.guard.knn_drop), ("rank", self.guard.min_rank)]
        watches = any(name in probes and bound for name, bound in watched)
        if isinstance(self.task, SelfDistillation) and self.task.dino and self.data.evaluated is not None:
            watches = watches or self.guard.min_prototypes is not None
        if self.guard.on_collapse == "stop" and not watches:
            raise ValueError("guard.on_collapse stop needs evaluate.probes with knn or rank, and its bound in guard")
        return self

    @model_validator(mode="after")
    def _figures_fit(self) -> Self:
        names, model, examples = self.evaluate.figures, self.model, self.evaluate.examples
        if not names:
            return self
        if self.task.traits.saves == "tokenizer":
            raise ValueError(
                f"evaluate.figures does not apply to task {self.task.kind}, which has codes and no attention to show"
            )
        if self.data.evaluated is None:
            raise ValueError("evaluate.figures needs data.val or data.holdout, because it draws at each evaluation")
        if not examples:
            raise ValueError("evaluate.examples: got 0, expected 1 to 64 images, which evaluate.figures are of")
        for name in names:
            fewest, reason = NEEDS[name].fewest_images, NEEDS[name].obstacle(model)
            if examples < fewest:
                got = f"got {examples}, expected at least {fewest}"
                raise ValueError(f"evaluate.examples: {got}: evaluate.figures has {name}")
            if reason:
                raise ValueError(f"evaluate.figures {name} does not apply to {model.name}, which has {reason}")
        return self

    @property
    def classification(self) -> Supervised | Finetune | None:
        """The task, if it learns classes."""
        return self.task if isinstance(self.task, Supervised | Finetune) else None

    @property
    def has_several_labels(self) -> bool:
        """Whether an image has any number of labels."""
        return self.classification is not None and self.classification.labels == "several"

    @property
    def thresholds(self) -> tuple[float, ...] | None:
        """The least probability of each class that counts as present; None of one label an image."""
        if self.classification is None or not self.has_several_labels:
            return None
        return self.classification.thresholds or (0.5,) * (self.model.num_classes or 0)

    @property
    def weights(self) -> str | None:
        """The address of the weights that the run starts from; None for new ones."""
        return self.task.weights if isinstance(self.task, Finetune | Lejepa | SelfDistillation) else None

    @property
    def distill(self) -> Distillation | None:
        """The distillation of a task with classes; None without a teacher."""
        return self.classification and self.classification.distill

    @property
    def submodels(self) -> int:
        """How many submodels each image of a step passes through: 2 with task.cosub, otherwise 1."""
        return 2 if self.classification and self.classification.cosub else 1

    @property
    def early_shape(self) -> tuple[int, int] | None:
        """Height and width of the images of the first steps; None where all steps have those of one size."""
        if self.data.early is None:
            return None
        size, patch = self.data.early.size, self.model.shape.patch
        if size is None:
            height, width = (max(1, 3 * patches // 4) * patch for patches in self.model.grid)
            return height, width
        return (size, size) if isinstance(size, int) else size

    @property
    def trained_models(self) -> list[tuple[Model, float]]:
        """The network at the patch and image sizes of its training steps, each with its share of the steps."""
        if patches := self.model.patches:
            return [(self.model.at_patch(patch), 1 / len(patches)) for patch in patches]
        if early := self.data.early:
            return [(self.model.at_size(self.early_shape or 0), early.share), (self.model, 1 - early.share)]
        return [(self.model, 1.0)]

    def replace(self, changes: Mapping[str, Any]) -> "Run":
        """Return another run with these dotted settings changed; settings that were omitted stay omitted."""
        tree = self.model_dump(mode="json")
        apply_changes(changes, tree)
        new = _validate(tree, dict.fromkeys(changes, "replace"), "replace")
        _restrict_fields_set(self, new, [path.split(".") for path in changes])
        return new

    def dotted(self) -> dict[str, Any]:
        """Return {dotted path: value} of all settings, as MLflow records them."""
        return dict(flatten(self.model_dump(mode="json"), ""))

    def to_yaml(self) -> str:
        """Return the run as a recipe that loads to the same value."""
        return dump_yaml(self.model_dump(mode="json"))


def load_run(recipe: str | Path | None = None, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Run:
    """Return the run of a recipe, with overrides applied: `["optim.lr=1e-3"]` or `{"optim.lr": 1e-3}`.

    `recipe` is a file or the name of a recipe that vitray brings, as in `demo`; None: the defaults.
    """
    tree, places = ({}, {}) if recipe is None else read_recipe(recipe_path(recipe))
    if isinstance(overrides, Mapping):
        changes, given = dict(overrides), dict.fromkeys(overrides, "overrides")
    else:
        changes = parse_overrides(overrides)
        given = {override.partition("=")[0]: place_of(override) for override in overrides}
    apply_changes(changes, tree)
    # Overrides last: an error of a whole section names the last place that set something in it.
    places = {setting: place for setting, place in places.items() if setting not in given} | given
    return _validate(tree, places, str(recipe or "defaults"))


def _restrict_fields_set(old: Section, new: Section, changed: Sequence[Sequence[str]]) -> None:
    """Mark the settings of `new` as set only where they are set in `old` or changed."""
    below = {path[0]: [rest[1:] for rest in changed if rest[0] == path[0]] for path in changed if path}
    new.model_fields_set.intersection_update(old.model_fields_set | below.keys())
    for name in type(new).model_fields:
        before, after = getattr(old, name, None), getattr(new, name)
        # A section that is changed as a whole counts as set as a whole.
        is_whole = type(before) is not type(after) or [] in below.get(name, ())
        if isinstance(before, Section) and isinstance(after, Section) and not is_whole:
            _restrict_fields_set(before, after, below.get(name, ()))


def _validate(tree: dict[str, Any], places: Mapping[str, str], source: str) -> Run:
    try:
        return Run.model_validate(tree)
    except ValidationError as invalid:
        raise explain_error(invalid, Run, places, source) from None
