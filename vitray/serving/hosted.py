"""The networks of one replica: a family in memory, filled from addresses, which follows the aliases among them."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vitray.config.serving import BASE_TASK, Serving, default_task, unknown_task
from vitray.data.augment.decode import UndecodableImage, decode_image
from vitray.errors import ConfigError, one_line
from vitray.inference.answers import check_classifier, class_names, is_classifier, probabilities, view_of
from vitray.serving.request_body import BadRequest
from vitray.weights import identity_of
from vitray.weights.addresses import is_model_uri, pin_uri
from vitray.weights.delta import read_state
from vitray.weights.family import Family, Member
from vitray.weights.folder import check_member, has_settings, read_member

logger = logging.getLogger("ray.serve")  # Serve writes it to the log of the replica


class Source(NamedTuple):
    """The network of a task, and its origin."""

    url: str
    """The address as the user wrote it."""
    pinned: str
    """The permanent address of the network."""
    member: Member


class Item(NamedTuple):
    """A decoded image and the network that answers for it."""

    member: Member
    view: np.ndarray


def is_alias(url: str) -> bool:
    """Whether the address may name another network later."""
    return is_model_uri(url) and "@" in url


def check_tasks(base_url: str, tasks: Mapping[str, str]) -> list[str]:
    """Return the tasks, the base's first; refuse one that cannot be served, without reading the deltas' tensors."""
    pinned = pin_uri(base_url)
    identity = identity_of(read_state(pinned))
    for name, url in tasks.items():
        try:
            check_classifier(check_member(pin_uri(url), pinned, identity), url)
        except ConfigError as error:
            raise ConfigError(f"{name}={url}: {error}") from None
    names = [BASE_TASK, *tasks] if _has_classes(pinned) else list(tasks)
    if not names:
        raise ConfigError(f"{base_url}: it has no classes, and no task is given; expected a classifier, or TASK=DELTA")
    return names


def _has_classes(url: str) -> bool:
    return has_settings(url) and is_classifier(check_member(url, url, ""))


class Hosted:
    """A base and its tasks on one device."""

    def __init__(self, serving: Serving, device: torch.device) -> None:
        self.precision, self.limits = serving.precision, serving.limits
        self.base_url = pin_uri(serving.base)
        base = read_state(self.base_url)
        self.identity = identity_of(base)
        self.family = Family(base, {}, device, graphs=serving.graphs)
        self.sources: dict[str, Source] = {}
        self.wanted: dict[str, str] = {}
        self.errors: dict[str, str] = {}  # why the network that a task names now was not loaded
        self.failures = 0  # batches in a row at which a network failed that had passed its check, and fails it now
        if _has_classes(self.base_url):
            self._load(BASE_TASK, serving.base)

    def set_tasks(self, tasks: Mapping[str, str]) -> None:
        """Load the tasks that are new or have another address, and remove those that are gone.

        A task that cannot be loaded keeps its former network, or else its requests get the reason.
        """
        self.wanted = dict(tasks)
        for name in self.sources.keys() - tasks.keys() - {BASE_TASK}:
            self.family.remove(name)
            self.sources = {other: source for other, source in self.sources.items() if other != name}
        self.errors = {name: error for name, error in self.errors.items() if name in tasks}
        self.follow_aliases()
        if not self.sources:
            raise ConfigError("; ".join(self.errors.values()))

    def _load(self, name: str, url: str) -> None:
        pinned = pin_uri(url)
        member = read_member(pinned, self.base_url, self.family.base, self.identity)
        check_classifier(member.run, url)
        member = self.family.placed(member)
        self.check(member, pinned)
        self.sources = self.sources | {name: Source(url, pinned, self.family.add(name, member))}

    def check(self, member: Member, url: str) -> None:
        """Raise unless the network answers for a black image."""
        black_HWC = np.zeros((*member.run.model.image_shape, 3), np.uint8)
        [row_K] = self.probabilities([Item(member, black_HWC)])
        if np.isnan(row_K[0]):
            raise ConfigError(f"{url}: the logits of a black image are not finite; expected a trained network")

    def follow_aliases(self) -> list[str]:
        """Load the networks to which aliases have moved, and return their tasks.

        A network that cannot be loaded leaves the former one in place, with the reason in the listing.
        """
        moved = []
        for name, url in self.wanted.items():
            source = self.sources.get(name)
            try:
                if source is None or source.url != url or (is_alias(url) and pin_uri(url) != source.pinned):
                    self._load(name, url)
                    moved.append(name)
                self.errors.pop(name, None)
            except Exception as error:  # the registry may be away, or the new network broken
                reason = one_line(error)[:300]
                if self.errors.get(name) != reason:  # not again at each of the next checks
                    state = f"keeps {source.pinned}" if source else "is not served"
                    logger.warning("task %s %s: %s", name, state, reason)
                self.errors[name] = reason
        return moved

    def listing(self) -> list[dict[str, Any]]:
        """Return each task with its address, classes and image size."""
        return [
            {
                "task": name,
                "url": source.url,
                "model": source.pinned,
                "image_size": source.member.run.model.image_shape,
                "classes": class_names(source.member),
                "error": self.errors.get(name),
            }
            for name, source in self.sources.items()
        ]

    def item(self, member: Member, data: bytes, index: int) -> Item:
        """Return an encoded image, decoded and cropped for a network."""
        try:
            return Item(member, view_of(decode_image(data, self.limits.pixels), member))
        except UndecodableImage as error:
            raise BadRequest(400, f"image {index}: {error}") from None
        except (ValueError, MemoryError) as error:
            raise BadRequest(400, f"image {index}: cannot be processed: {error}") from None

    def choose(self, task: str | None, top_k: int | None) -> tuple[str, Source, int]:
        """Return the name of a task, its network and the number of classes to answer with."""
        sources = self.sources  # another thread may replace the table
        names = list(sources)
        name = default_task(names) if task is None else task
        if name is None:
            raise BadRequest(400, f"task: expected ?task= one of {', '.join(names[:20])}")
        if name not in sources and name in self.errors:
            raise BadRequest(503, f"task {name}: {self.errors[name]}")
        if name not in sources:
            raise BadRequest(404, unknown_task(name, names))
        count = len(class_names(sources[name].member))
        if top_k is not None and top_k > count:
            raise BadRequest(400, f"top_k: got {top_k}, expected 1 to {count}, the number of classes")
        return name, sources[name], top_k or min(5, count)

    def answers(self, items: Sequence[Item]) -> list[np.ndarray | str]:
        """Return the probabilities of each image of a batch, or why there are none.

        A network that fails does so alone: the images of the others are answered.
        """
        rows: list[np.ndarray | str] = [""] * len(items)
        is_broken = False
        try:
            rows[:] = self.probabilities(items)
        except Exception:
            logger.exception("a batch of %d images failed, and is computed network by network", len(items))
            for member in dict.fromkeys(item.member for item in items):
                own = [index for index, item in enumerate(items) if item.member is member]
                try:
                    results: Sequence[np.ndarray | str] = self.probabilities([items[index] for index in own])
                except Exception as error:
                    results = [one_line(error)[:300]] * len(own)
                    is_broken = is_broken or not self._passes_check(member)
                for index, result in zip(own, results, strict=True):
                    rows[index] = result
        self.failures = self.failures + 1 if is_broken else 0
        reason = "the network's logits are not finite"
        return [reason if not isinstance(row, str) and np.isnan(row[0]) else row for row in rows]

    def _passes_check(self, member: Member) -> bool:
        """Whether a network still answers as when it was loaded; otherwise this process or its device is broken."""
        try:
            self.check(member, "")
        except Exception:
            return False
        return True

    def probabilities(self, items: Sequence[Item]) -> list[np.ndarray]:
        """Return the probabilities of each image of a batch; NaN for one whose logits are not all finite."""
        with torch.autocast(self.family.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return probabilities(self.family, [item.view for item in items], [item.member for item in items])
