"""`Run`: everything that decides an experiment, as one frozen value."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from vitray.config.reading import apply_changes, dump_yaml, flatten, parse_words, read_recipe
from vitray.config.refusals import refusal
from vitray.config.sections import Model, Section, one_of
from vitray.config.training import (
    Checkpoint,
    Compute,
    Data,
    Evaluate,
    Finetune,
    Guard,
    Optim,
    Supervised,
    Tracking,
)


class Run(Section):
    """Everything that decides an experiment."""

    seed: Annotated[int, Field(ge=0)] = 0
    model: Model = Model()
    task: Annotated[Supervised | Finetune, Field(discriminator="kind"), one_of("supervised")] = Supervised()
    data: Data = Data()
    optim: Optim = Optim()
    compute: Compute = Compute()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    tracking: Tracking = Tracking()

    def replace(self, changes: Mapping[str, Any]) -> "Run":
        """Another run that differs in these dotted settings."""
        tree = self.model_dump(mode="json")
        apply_changes(changes, tree)
        return _validate(tree, dict.fromkeys(changes, "replace"), "replace")

    def dotted(self) -> dict[str, Any]:
        """Every setting by its dotted path, as MLflow records it."""
        return dict(flatten(self.model_dump(mode="json"), ""))

    def to_yaml(self) -> str:
        """The run as a recipe that loads to the same value."""
        return dump_yaml(self.model_dump(mode="json"))


def load_run(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Run:
    """The run of a recipe (None: of the defaults), with `a.b=c` words laid over it."""
    tree, places = ({}, {}) if path is None else read_recipe(Path(path))
    words = {word.partition("=")[0]: f"the word {word!r}" for word in overrides}
    apply_changes(parse_words(overrides), tree)
    # Words come last: where a whole section does not fit together, the last thing said about it is named.
    places = {setting: place for setting, place in places.items() if setting not in words} | words
    return _validate(tree, places, str(path or "defaults"))


def _validate(tree: dict[str, Any], places: Mapping[str, str], source: str) -> Run:
    try:
        return Run.model_validate(tree)
    except ValidationError as invalid:
        raise refusal(invalid, Run, places, source) from None
