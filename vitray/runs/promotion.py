"""Promotion of a registered version: compared with the holder of an alias, which moves if the rule allows it."""

import re
import shlex
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, assert_never

from vitray.config import Run, load_run
from vitray.config.training import Promote, check_alias
from vitray.errors import ConfigError, RunError, one_line
from vitray.metrics.intervals import Comparison
from vitray.runs.console import Console
from vitray.runs.run_dir import RUN_META, stored_run
from vitray.system import storage
from vitray.tracking.model_registry import holder_of, move_alias, tag_promotion, version_of_run
from vitray.weights.addresses import pin_uri, resolve_uri

if TYPE_CHECKING:
    from vitray.evaluation.results import PairResult

When = Literal["better", "significantly_better"]

# Comparisons before giving up, where other processes keep moving the alias.
ATTEMPTS = 5


class PromotionRequest(NamedTuple):
    """One call of `vitray promote`; None takes the setting of the run that trained the version, or else the default."""

    model: str
    """`name@alias` or `name/3`, also with `models:/`, or the folder of a run."""
    data: str | None = None
    split: str | None = None
    alias: str | None = None
    when: When | None = None
    out: str | None = None
    """The folder of the comparison's page."""
    workers: int | None = None


class Promotion(NamedTuple):
    """A version, and whether it has the alias."""

    name: str
    version: str
    alias: str
    holder: str | None
    """The version that had the alias before; None if none had."""
    promoted: bool
    """Whether the version now has the alias."""
    reason: str
    pair: "PairResult | None"
    """The version against the holder; None if they were not compared."""
    page: str | None

    def sentence(self) -> str:
        """Return the result and its reason in words."""
        if self.promoted:
            return f"version {self.version} of {self.name} is now {self.alias}: {self.reason}"
        return f"version {self.version} of {self.name} does not become {self.alias}: {self.reason}"

    def flat(self) -> dict[str, Any]:
        """Return everything for JSON."""
        values = self._asdict()
        del values["pair"]
        return values | {"comparison": self.pair and self.pair.flat(), "sentence": self.sentence()}


class _Candidate(NamedTuple):
    name: str
    version: str
    run: Run
    """The settings of its training."""

    @property
    def url(self) -> str:
        return f"models:/{self.name}/{self.version}"


def promote(request: PromotionRequest) -> Promotion:
    """Compare a version with the holder of the alias, move the alias if the rule allows it, and return the result.

    If the alias moves during the comparison, its new holder is compared.
    """
    alias = request.alias
    if alias is not None:
        try:
            check_alias(alias)
        except ValueError as error:
            raise ConfigError(f"--alias: {error}") from None
    candidate = _find_candidate(request.model)
    rule = candidate.run.tracking.promote or Promote()
    alias, when = alias or rule.alias, request.when or rule.when
    for _ in range(ATTEMPTS):
        holder = holder_of(candidate.name, alias)
        promotion = _compare(candidate, holder, request._replace(alias=alias, when=when))
        if holder == candidate.version:  # it keeps the note of its own promotion
            return promotion
        if not promotion.promoted or move_alias(candidate.name, alias, candidate.version, holder):
            with suppress(ConfigError):  # the result stands without its note
                tag_promotion(candidate.name, candidate.version, promotion.sentence())
            return promotion
    raise RunError(f"{candidate.name}@{alias}: its version changed {ATTEMPTS} times during the comparison; try again")


def promote_finished(run_dir: str, data: str, workers: int | None = None) -> str:
    """Promote the version that a finished run has registered, and return the result in words, also of a failure."""
    try:
        promotion = promote(PromotionRequest(run_dir, data, out=storage.join(run_dir, "promotion"), workers=workers))
        text = promotion.sentence()
        facts = {"promotion": text} | ({"page": promotion.page} if promotion.page else {})
    except Exception as error:  # the run is finished, and stays so
        reason = str(error) if isinstance(error, ConfigError | RunError) else one_line(error)
        later = f"vitray sync; {shlex.join(['vitray', 'promote', run_dir, data])}"
        text = f"not done: {reason}. Later: {later}"
        facts = {"promotion": f"not done: {reason}", "later": later}
    Console().block(facts)
    return text


def decide(comparison: Comparison, when: When) -> tuple[bool, str]:
    """Return whether the first of two versions gets the alias of the second, and why."""
    sentence, is_higher = comparison.sentence(), comparison.difference.difference > 0
    match when:
        case "better":
            return is_higher, sentence
        case "significantly_better":
            return is_higher and comparison.significant, sentence
        case _:
            assert_never(when)


def _find_candidate(model: str) -> _Candidate:
    """Return the version at an address, or the one that the run in a folder has registered."""
    if storage.exists(storage.join(model, RUN_META)):
        run = stored_run(model)
        if run.tracking.register_as is None:
            raise ConfigError(f"{model}: its tracking.register_as is null; expected a run with a registered model")
        uid = storage.read_json(storage.join(model, RUN_META))["uid"]
        name = run.tracking.register_as
        return _Candidate(name, version_of_run(name, run.tracking.experiment, uid), run)
    address = model.removeprefix("models:/")
    if not re.fullmatch(r"[^/@]+(@[^/@]+|/[0-9]+)", address):
        raise ConfigError(f"{model}: expected name@alias or name/3 of a registered model, or the folder of a run")
    url = pin_uri(f"models:/{address}")
    name, _, version = url.removeprefix("models:/").rpartition("/")
    settings = storage.join(resolve_uri(url), "run.yaml")
    if not storage.exists(settings):  # a model of another library
        return _Candidate(name, version, Run())
    with storage.local_copy(settings) as path:
        return _Candidate(name, version, load_run(path))


def _compare(candidate: _Candidate, holder: str | None, request: PromotionRequest) -> Promotion:
    """Return the result before the alias moves."""
    assert request.alias is not None
    assert request.when is not None
    reason = "no version had the alias"
    result = Promotion(candidate.name, candidate.version, request.alias, holder, True, reason, None, None)
    if holder is None:
        return result
    if holder == candidate.version:
        return result._replace(reason="it had the alias already")  # of an earlier command, perhaps a killed one
    from vitray.evaluation.evaluate import Request, evaluate  # torch takes a second

    data, split = request.data or candidate.run.data.url, request.split or candidate.run.data.val or "val"
    if data is None:
        raise ConfigError(f"{candidate.url}: its run names no images; expected DATA to compare the versions on")
    urls = [candidate.url, f"models:/{candidate.name}/{holder}"]
    evaluation, page = evaluate(Request(urls, data, split, out=request.out, workers=request.workers))
    [pair] = evaluation.pairs
    promoted, reason = decide(pair.comparison, request.when)
    verdict = f"compared with version {holder}, which {'had' if promoted else 'keeps'} the alias. {reason}"
    return result._replace(promoted=promoted, reason=verdict, pair=pair, page=page)
