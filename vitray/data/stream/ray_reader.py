"""Ray Data as the reader of a stream.

One execution serves all workers: from_items(pieces) -> map_batches(read, decode, augment) -> streaming_split. The
pieces are planned (epoch_order.py): Ray neither drops nor moves an image, it deals their blocks to the workers in turn.
On large nodes each has an execution of its own, whose blocks stay there.
"""

import logging
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from math import gcd
from typing import Any

import numpy as np
import ray
import ray.data
from ray.data import DataIterator, ExecutionResources

from vitray.data.stream.batches import Share
from vitray.data.stream.cache import decoded_split
from vitray.data.stream.decoding import Images, decode_positions, joined
from vitray.data.stream.epoch_order import Cut, Piece, positions_of
from vitray.data.stream.stream import Stream

# Ray Data's log lines that DataContext cannot turn off.
QUIET_LOGGERS = {
    # "The job may hang forever" after ten seconds without a free CPU, also in runs that finish; a lack of CPUs ends a
    # run with an error of its own (RAY_DATA_EXECUTION_NO_PROGRESS_TIMEOUT_S).
    "ray.data._internal.execution.resource_manager": logging.ERROR,
    "ray.data._internal.execution.streaming_executor": logging.WARNING,  # a line per execution
    "ray.data._internal.progress": logging.ERROR,  # that progress bars are off
    # Two concurrent executions, such as training and evaluation, log to one file.
    "ray.data._internal.logging": logging.WARNING,
}
for _name, _level in QUIET_LOGGERS.items():
    logging.getLogger(_name).setLevel(_level)
# "The Dataset job will hang" where the workers have all CPUs for a moment, as in each run with one worker.
UNTRUE_WARNINGS = {"ray.data.dataset": "any available CPUs"}
for _name, _words in UNTRUE_WARNINGS.items():
    logging.getLogger(_name).addFilter(lambda record, words=_words: words not in record.getMessage())

# Pieces of the first execution, of which each has twice as many, of the largest, and how many before the end of one the
# next one starts: Ray stores all pieces of an execution before it starts the first, in about a millisecond each. All
# workers start it after the same step, as they wait for each other. Its first blocks wait to be read.
FIRST_PIECES, PIECES_AT_ONCE, PIECES_AHEAD = 256, 8192, 1024
# Blocks that Ray fetches for a worker ahead of its reading.
BLOCKS_AHEAD = 2
# CPUs that a node has for each execution, at least, and the share of the CPUs that are on such nodes: Ray Data gives
# each execution whole CPUs of each node, during a change of executions to twice as many, and to an evaluation.
CPUS_PER_EXECUTION, MOST_CPUS = 8, 0.9


class RayReader:
    """One stream read by Ray Data; `stream.Reader` says what its methods do."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._evaluation: list[DataIterator] = []
        # On the first worker. Dropping the last reference ends an execution, and the previous one may still be read.
        self._executions: list[list[DataIterator]] = []

    def train(self, steps: range, share: Share) -> Generator[Images, None, None]:
        spec, epoch_steps = self._stream.spec, self._stream.steps
        # The first worker decides: the cluster's memory may change between the queries of several workers.
        cut = share.broadcast(self._divided(self._cut(share.workers, spec.repeats), share.nodes))
        executions, ahead = self._execution_ranges(steps, cut)
        # The next execution starts in a thread before this one ends, so that no worker waits at the change.
        opener, following = ThreadPoolExecutor(1), None
        try:
            for steps_now, after in zip_longest(executions, executions[1:]):
                blocks = following.result() if following else self._open_training(steps_now, cut, share, hurried=True)
                reader = BlockReader(blocks, self._stream.no_images)
                for step in steps_now:
                    if step == max(steps_now.start, steps_now.stop - ahead) and after:
                        following = opener.submit(self._open_training, after, cut, share)
                    epoch, within = divmod(step, epoch_steps)
                    yield reader.take(epoch, positions_of(within, spec.batch, share.rank, share.workers))
        except GeneratorExit:  # closed on all workers after the same step
            if following and share.workers > 1:
                wait([following])  # its broadcast must not overlap with one of a later stream
            raise
        finally:
            opener.shutdown(wait=False)

    def _execution_ranges(self, steps: range, cut: Cut) -> tuple[list[range], int]:
        """Return the steps of each execution, and how many before its end the next one starts."""
        batch, executions = self._stream.spec.batch, list[range]()
        rows = min(cut.rows, self._stream.steps * batch)  # a piece is of one epoch
        first, most, ahead = (max(1, pieces * rows // batch) for pieces in (FIRST_PIECES, PIECES_AT_ONCE, PIECES_AHEAD))
        if not (bulk := min(most, self._bulk(cut))):
            count = min(first, most)
            while steps:
                executions.append(steps[:count])
                steps = steps[count:]
                count = min(2 * count, most)
            return executions, ahead
        # A worker waits for the whole of an execution, and no CPU decodes during the steps of the last one.
        # So the first and the last ones are short.
        count = least = min(bulk, max(1, cut.rows // batch))
        while steps:
            executions.append(steps[:count])
            steps = steps[count:]
            count = min(2 * count, bulk, max(least, len(steps) // 2))
        return executions, bulk

    def _bulk(self, cut: Cut) -> int:
        """Return the most steps of an execution in bulk: memory holds the blocks of three; 0 if it is not in bulk."""
        return (
            self._memory // 3 // (self._stream.spec.batch * self._stream.spec.image_bytes)
            if self._stream.spec.in_bulk and cut.workers == 1
            else 0
        )

    def evaluate(self, share: Share) -> Generator[Images, None, None]:
        spec, images = self._stream.spec, self._stream.images
        if not self._evaluation:  # later evaluations execute the same pieces again
            cut = self._cut(share.workers, repeats=1)._replace(held=0)
            self._evaluation = share.broadcast(
                self._execute(list(cut.pieces(0, 0, images)), cut, shuffled=False) if share.rank == 0 else None
            )
        # Contiguous pieces have a block for each worker, in the order of their ranks.
        reader = BlockReader(_started(self._evaluation[share.rank]), self._stream.no_images)
        for step in range(-(-images // spec.batch)):
            positions = positions_of(step, spec.batch, share.rank, share.workers)
            yield reader.take(0, positions[positions < images])

    def _cut(self, workers: int, repeats: int) -> Cut:
        return Cut.fitting(self._stream.spec.image_bytes, self._memory, self._stream.spec.batch, workers, repeats)

    def _divided(self, cut: Cut, nodes: int) -> Cut:
        """Return a cut whose teams are divided among as many executions as nodes, or fewer: one hands out few blocks.

        An execution for each node decodes there, unless other nodes have CPUs, too.
        """
        executions = gcd(cut.teams, nodes)
        cpus = [cpus for node in ray.nodes() if node["Alive"] and (cpus := node["Resources"].get("CPU", 0.0))]
        while executions > 1 and sum(n for n in cpus if n >= CPUS_PER_EXECUTION * executions) < MOST_CPUS * sum(cpus):
            executions //= 2
        return cut._replace(executions=executions, is_local=1 < executions == nodes == len(cpus))

    @property
    def _memory(self) -> int:
        return self._stream.spec.memory or int(ray.cluster_resources()["object_store_memory"]) // 4

    def _open_training(self, steps: range, cut: Cut, share: Share, *, hurried: bool = False) -> Iterator[Images]:
        """Start an execution for some steps of the run, and return this worker's blocks; a step waits for the first.

        The first worker of an execution starts it, and Ray hands out its blocks on that worker's node.
        """
        iterators, first, last = None, steps.start, steps.stop
        if share.rank < cut.executions:
            self._executions = self._executions[-1:]
            batch, length = self._stream.spec.batch, self._stream.steps
            pieces = chain.from_iterable(
                cut.pieces(
                    epoch,
                    max(first - epoch * length, 0) * batch,
                    min(last - epoch * length, length) * batch,
                    hurried=hurried and epoch == first // length,
                )
                for epoch in range(first // length, -(-last // length))
            )
            own = [piece for piece in pieces if piece.team % cut.executions == share.rank]
            iterators = self._execute(own, cut, shuffled=True)
            self._executions.append(iterators)
        opened = [share.broadcast(iterators if share.rank == rank else None, rank) for rank in range(cut.executions)]
        return _started(opened[share.rank % cut.executions][cut.place(share.rank)])

    def _execute(self, pieces: list[Piece], cut: Cut, *, shuffled: bool) -> list[DataIterator]:
        """Return an iterator over the blocks of each worker, in the order of their places."""
        source = self._stream.rows
        if self._stream.spec.cache == "decoded":
            source = source._replace(decoded=decoded_split(self._stream.dataset, self._stream.spec.split))
        order, view = self._stream.order(0 if shuffled else None), self._stream.view(0)
        shared = ray.put((source, order, view, cut))  # once, not with every task
        items = ray.data.from_items([piece._asdict() for piece in pieces], override_num_blocks=len(pieces))
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()} if cut.is_local else None
        decode: Any = partial(_decode_piece, shared=shared)
        blocks = items.map_batches(decode, batch_size=1, label_selector=here)
        context = blocks.context
        context.execution_options.preserve_order = True
        # Smaller than any row, so that each row, which holds all images of a block, becomes a block of Ray's.
        context.target_max_block_size = 1
        # Ray pauses a task that is some unread blocks ahead, and a paused task keeps its CPU: evaluation would wait for
        # the CPUs of a training stream that waits for evaluation. So a task may leave all of its blocks unread.
        context._max_num_blocks_in_streaming_gen_buffer = cut.members + 1
        cpus, executions = self._stream.spec.cpus, cut.executions
        limits = ExecutionResources(
            cpu=None if cpus is None else max(1, cpus // executions), object_store_memory=self._memory // executions
        )
        context.execution_options.resource_limits = limits
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        if cut.workers > 1:
            # Each block has one row for Ray, so that equal shares are dealt in turn.
            return blocks.streaming_split(cut.workers // executions, equal=False)
        return [blocks.materialize().iterator() if shuffled and self._bulk(cut) else blocks.iterator()]


class BlockReader:
    """A worker's blocks, regrouped to the positions of its steps."""

    def __init__(self, blocks: Iterator[Images], no_images: Images) -> None:
        self._blocks, self._no_images = blocks, no_images
        self._epoch = 0
        # Blocks of one epoch that are not used up, whose positions ascend.
        self._open: list[Images] = []

    def take(self, epoch: int, positions: np.ndarray) -> Images:
        """Return the images at ascending positions, which must be the next of this worker's."""
        if epoch != self._epoch and any(len(block["position"]) for block in self._open):
            raise RuntimeError(f"epoch {self._epoch} ended with blocks that no step used")
        self._epoch = epoch
        parts, found = [], 0
        waiting, self._open = self._open, []
        while found < len(positions):
            block = waiting.pop(0) if waiting else self._next()
            count = int(np.searchsorted(block["position"], positions[-1], side="right"))
            found += count
            if count:
                parts.append({name: column[:count] for name, column in block.items()})
            if count < len(block["position"]):
                self._open.append({name: column[count:] for name, column in block.items()})
        self._open += waiting
        images = joined(parts or [self._no_images])
        # Exactly the planned images, in order.
        if not np.array_equal(images["position"], positions):
            raise RuntimeError(f"epoch {epoch}: got positions {images['position']}, planned {positions}")
        return images

    def _next(self) -> Images:
        while not len((block := next(self._blocks))["position"]):  # this worker had no image in the piece
            continue
        epoch = int(block.pop("epoch"))
        if epoch != self._epoch:
            raise RuntimeError(f"got a block of epoch {epoch} in epoch {self._epoch}")
        return block


def _started(iterator: DataIterator) -> Iterator[Images]:
    """Return the blocks of an iterator; waits for the first, since an execution starts when all workers ask for it."""
    options: Any = {"batch_size": None, "batch_format": "numpy", "prefetch_batches": BLOCKS_AHEAD}  # whole blocks
    rows: Iterator[Any] = iter(iterator.iter_batches(**options))
    return ({name: column[0] for name, column in row.items()} for row in chain([next(rows)], rows))


def _decode_piece(item: dict[str, np.ndarray], shared: ray.ObjectRef) -> Iterator[Images]:
    """Yield the block of each member of the piece's team, as one row."""
    piece = Piece(**{name: int(column[0]) for name, column in item.items()})
    rows, order, view, cut = ray.get(shared)
    if order.shuffle is not None:
        identity, seed, _ = order.shuffle
        order = replace(order, shuffle=(identity, seed, piece.epoch))
    for images in decode_positions(cut.shares(piece), rows, order, view._replace(epoch=piece.epoch)):
        row = images | {"epoch": np.array(piece.epoch)}
        yield {name: column[np.newaxis] for name, column in row.items()}
