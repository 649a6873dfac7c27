"""Parts of a prediction as Parquet files: each row is an image, in the order of the plan.

Shapes: B images, K classes, T top classes.
"""

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vitray.data.shards.manifest import shard_errors
from vitray.data.shards.tables import read_table
from vitray.errors import ConfigError, RunError
from vitray.inference.network_spec import NetworkSpec
from vitray.inference.plan import Options, Plan, column_widths
from vitray.models.probabilities import present_labels, probabilities_of
from vitray.pages.files import csv_text
from vitray.system import storage

if TYPE_CHECKING:
    from torch import Tensor

    from vitray.inference.networks import Networks

Lines = Literal["csv", "jsonl"]
# In the metadata of a part: the hash of the plan that it belongs to.
IDENTITY = b"vitray.plan"
READS_AT_ONCE = 16
# Skipped images that predictions.json names; each has its reason in its part too.
NAMED = 1000


class Counts(NamedTuple):
    """The images of all parts."""

    written: int
    skipped: int
    reasons: dict[str, int]
    named: list[tuple[str, str]]
    """The first skipped images, each with its reason."""


def load_networks(plan: Plan) -> "Networks":
    """Return the networks of a plan on its device."""
    from vitray.inference.networks import Networks

    return Networks(plan.networks, plan.wanted, plan.numerics)


def predict_batch(plan: Plan, networks: "Networks", views: Sequence[np.ndarray], has_pixels: np.ndarray) -> pa.Table:
    """Return the columns of all networks for a batch of each view, null where an image has no pixels.

    Compiled networks see the whole batch with its padding, of one shape. The last part has fewer batches than the
    others.
    """
    if not len(has_pixels):
        return pa.table({})
    rows = slice(None) if plan.options.compile else slice(len(has_pixels))
    outputs = networks.outputs([view_BHWC[rows] for view_BHWC in views])
    columns: dict[str, pa.Array] = {}
    for spec in plan.networks:
        values = {
            name: value[: len(has_pixels)].float().cpu()[has_pixels] for name, value in outputs[spec.name].items()
        }
        prefix = f"{spec.name}/" if len(plan.networks) > 1 else ""
        for name, array in arrays_of(plan.options, spec, values).items():
            columns[prefix + name] = _lists(array, has_pixels)
        if spec.thresholds is not None and plan.options.top_k:
            columns |= {prefix + name: array for name, array in _present(spec, values["logits"], has_pixels).items()}
    return pa.table(columns)


def arrays_of(options: Options, spec: NetworkSpec, values: "Mapping[str, Tensor]") -> dict[str, pa.Array]:
    """Return the values of each column for the usable images, one after another."""
    arrays = {}
    if spec.num_classes is not None and options.top_k:
        logits_BK = values["logits"]
        # Sorted by logits, as large ones have equal sigmoids; stable: of equal logits the lower class is first.
        classes_BT = logits_BK.sort(dim=-1, descending=True, stable=True).indices[:, : options.top_k]
        probabilities_BT = probabilities_of(logits_BK, spec.probability).gather(1, classes_BT)
        names = spec.classes or [str(number) for number in range(spec.num_classes)]
        arrays["classes"] = pa.array([names[number] for number in classes_BT.flatten().tolist()], pa.string())
        arrays["probabilities"] = pa.array(probabilities_BT.flatten().numpy())
    columns = {"logits": "logits"} if options.logits else {}
    columns |= {level: level for level in options.levels} | ({"embedding": "features"} if options.embedding else {})
    return arrays | {name: pa.array(values[of].flatten().numpy()) for name, of in columns.items() if of in values}


def _present(spec: NetworkSpec, logits_BK: "Tensor", has_pixels: np.ndarray) -> dict[str, pa.Array]:
    """Return the classes that a network of several labels an image takes as present, and their probabilities."""
    assert spec.thresholds is not None
    rows = iter(probabilities_of(logits_BK, spec.probability).numpy())
    names = spec.classes or [str(number) for number in range(spec.num_classes or 0)]
    labels: list[list[str] | None] = []
    scores: list[list[float] | None] = []
    for is_usable in has_pixels.tolist():
        row_K = next(rows) if is_usable else None
        present = None if row_K is None else present_labels(row_K, spec.thresholds)
        labels.append(None if present is None else [names[label] for label in present])
        scores.append(None if row_K is None else row_K[present].tolist())
    return {"labels": pa.array(labels, pa.list_(pa.string())), "scores": pa.array(scores, pa.list_(pa.float32()))}


def _lists(values: pa.Array, has_pixels: np.ndarray) -> pa.ListArray:
    """Return the values as a list of equal length for each usable image, and null for the others."""
    # Not of a fixed size: pyarrow 25 cannot read those with nulls from Parquet.
    size = len(values) // max(1, int(has_pixels.sum()))
    offsets = np.concatenate([[0], np.cumsum(has_pixels * size)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(~has_pixels))


def write_part(plan: Plan, part: int, tables: Sequence[pa.Table], reasons: Sequence[str | None]) -> None:
    """Write one part, atomically: its keys, the reasons for images without outputs, and the outputs of its batches.

    Outputs that are not finite are refused by the key of their first image, as in an evaluation.
    """
    start, stop = plan.span(part, 0)[0], plan.span(part, plan.batches - 1)[1]
    outputs = pa.concat_tables([table for table in tables if table.num_rows])
    if not len(reasons) == outputs.num_rows == stop - start:
        raise RuntimeError(f"part {part}: got {outputs.num_rows} rows, planned {stop - start}")
    columns = {"key": plan.images.table["key"].slice(start, stop - start), "error": pa.array(reasons, pa.string())}
    columns |= {name: outputs[name] for name in outputs.column_names}
    used = np.flatnonzero([reason is None for reason in reasons])
    for name, width in column_widths(plan).items():
        if not pa.types.is_floating(outputs[name].type.value_type):
            continue
        values = np.concatenate([chunk.flatten().to_numpy() for chunk in outputs[name].chunks])
        if len(wrong := used[~np.isfinite(values.reshape(-1, width)).all(1)]):
            count = f"{len(wrong):,} of the {stop - start:,} images of part {part}"
            raise ConfigError(
                f"{columns['key'][int(wrong[0])]}: the network's {name} are not finite, as of {count}; expected the"
                " weights of a finished training"
            )
    table = pa.table(columns).combine_chunks().replace_schema_metadata({IDENTITY: plan.identity.encode()})
    pq.write_table(table, content := io.BytesIO())
    storage.write_bytes(plan.address(part), content.getvalue())


def count_images(plan: Plan) -> Counts:
    """Return the counts over all parts; check that each belongs to the plan and has its images once."""

    def one(part: int) -> pa.Table:
        files, path = storage.filesystem(url := plan.address(part))
        with shard_errors(url), pq.ParquetFile(path, filesystem=files) as file:
            table = file.read(columns=["key", "error"])
            if (file.schema_arrow.metadata or {}).get(IDENTITY) != plan.identity.encode():
                raise RunError(f"{url}: written by another prediction in the same folder")
        start, stop = plan.span(part, 0)[0], plan.span(part, plan.batches - 1)[1]
        if not table["key"].equals(plan.images.table["key"].slice(start, stop - start)):
            raise RunError(f"{url}: its keys are not those of the plan: remove it, and repeat the command")
        return table.filter(table["error"].is_valid())

    reasons, named = Counter[str](), []
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        for skipped in pool.map(one, range(plan.parts)):
            reasons.update(skipped["error"].to_pylist())
            pairs = zip(skipped["key"].to_pylist(), skipped["error"].to_pylist(), strict=True)
            named += list(pairs)[: NAMED - len(named)]
    skipped = reasons.total()
    return Counts(len(plan.images) - skipped, skipped, dict(reasons.most_common()), named)


def read_parts(plan: Plan) -> pa.Table:
    """Return the rows of all parts, which are written."""
    return pa.concat_tables([read_table(plan.address(part)) for part in range(plan.parts)])


def print_part(plan: Plan, part: int, lines: Lines, to: TextIO) -> None:
    """Print the rows of a part: as JSON objects, or as CSV with a column for each number of a list."""
    table = read_table(plan.address(part))
    if lines == "jsonl":
        to.writelines(f"{json.dumps(row)}\n" for row in table.to_pylist())
    else:
        widths = column_widths(plan)
        others = [name for name in table.column_names if name not in {"key", "error", *widths}]
        rows: list[list[Any]] = []
        if part == 0:
            names = [[f"{name}_{number}" for number in range(1, width + 1)] for name, width in widths.items()]
            rows.append(["key", "error", *chain.from_iterable(names), *others])
        for row in table.to_pylist():
            lists = (row[name] or [None] * width for name, width in widths.items())
            # As many as an image has: in one cell each.
            more = ("|".join(map(str, row[name] or ())) for name in others)
            rows.append([row["key"], row["error"], *chain.from_iterable(lists), *more])
        to.write(csv_text(rows, line_end="\n"))
    to.flush()
