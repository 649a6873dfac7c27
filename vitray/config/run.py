"""`Run`: everything that decides an experiment, as one frozen value."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from vitray.config.parsing import apply_changes, dump_yaml, flatten, parse_words, read_recipe
from vitray.config.pretraining import Masked, Tokenizer, misfit
from vitray.config.sections import Model, Section, one_of
from vitray.config.training import Checkpoint, Compute, Data, Evaluate, Finetune, Guard, Optim, Supervised, Tracking
from vitray.config.validation import refusal


class Run(Section):
    """Everything that decides an experiment."""

    seed: Annotated[int, Field(ge=0)] = 0
    model: Model = Model()
    task: Annotated[Supervised | Finetune | Masked | Tokenizer, Field(discriminator="kind"), one_of("supervised")] = (
        Supervised()
    )
    data: Data = Data()
    optim: Optim = Optim()
    compute: Compute = Compute()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def _task_fits(self) -> Self:
        if isinstance(self.task, Masked | Tokenizer) and (said := misfit(self.task, self.model, self.data)):
            raise ValueError(said)
        return self

    def replace(self, changes: Mapping[str, Any]) -> "Run":
        """Another run that differs in these dotted settings; what was left open in this one is open in that."""
        tree = self.model_dump(mode="json")
        apply_changes(changes, tree)
        new = _validate(tree, dict.fromkeys(changes, "replace"), "replace")
        _leave_open(self, new, [path.split(".") for path in changes])
        return new

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


def _leave_open(old: Section, new: Section, changed: Sequence[Sequence[str]]) -> None:
    """Let the settings of `new` count as given only where they do in `old`, or are changed."""
    below = {path[0]: [rest[1:] for rest in changed if rest[0] == path[0]] for path in changed if path}
    new.model_fields_set.intersection_update(old.model_fields_set | below.keys())
    for name in type(new).model_fields:
        before, after = getattr(old, name, None), getattr(new, name)
        # A section that is changed as a whole is given as a whole.
        is_whole = type(before) is not type(after) or [] in below.get(name, ())
        if isinstance(before, Section) and isinstance(after, Section) and not is_whole:
            _leave_open(before, after, below.get(name, ()))


def _validate(tree: dict[str, Any], places: Mapping[str, str], source: str) -> Run:
    try:
        return Run.model_validate(tree)
    except ValidationError as invalid:
        raise refusal(invalid, Run, places, source) from None
