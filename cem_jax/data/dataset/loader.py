"""Batches of token windows: shuffled for training, in order for evaluation.

B windows per batch · R of its rows in this process · S steps · J targets per window (J+1 tokens)

Training windows are numbered n = step·B + row through the whole run, and `order` says which window
the n-th is. A batch is therefore a pure function of (seed, step, B): it depends neither on the
number of processes nor on when the run was resumed. A run that resumes with another B begins at the
first number that it has not consumed (`TrainLoader.resumed`): none is repeated or left out.

grain prefetches the batches in a thread and returns them in order. Everything else is ours, because
the state of grain's own iterators is tied to the number of processes.
"""

import copy
from collections.abc import Generator, Iterator

import numpy as np
from jaxtyping import Int32, Int64, Integer

from cem_jax.data.dataset.mixture import Mixture, single
from cem_jax.data.dataset.order import WindowOrder, drawn
from cem_jax.data.dataset.store import Dataset, TokenStream, num_windows
from cem_jax.errors import UserError

Batch = dict[str, Int32[np.ndarray, "R J+1"]]  # tokens, and segments under a document mask

# A batch takes less than a millisecond to make. Handing over each one alone would take as long, and
# arrays of a few megabytes get large memory pages: grain's element is a block of batches.
_BLOCK_BYTES, _BLOCK_STEPS = 8 << 20, 32  # size of a block, at most
_BLOCKS = 4  # prefetched, unless a single batch is larger than that
_NO_LAST_STEP = 1 << 60


class TrainLoader:
    """Shuffled windows of a dataset or mixture, as a pure function of (seed, step).

    `rows` are the rows of the global batch that this process reads, in order; None means all.

    Raises:
      UserError: the split is missing, smaller than a window, or has fewer windows than a batch.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture,
        *,
        split: str = "train",
        context: int,
        global_batch: int,
        seed: int,
        document_mask: bool = False,
        prefetch: int = 2,
        rows: slice | Int64[np.ndarray, " R"] | None = None,
    ):
        self.mixture = dataset if isinstance(dataset, Mixture) else single(dataset)
        for source in self.mixture.sources:
            _require_window(source, split, context)
        tokens = [source.split(split).tokens for source in self.mixture.sources]
        sizes = tuple(num_windows(count, context) for count in tokens)
        self.order = WindowOrder(seed, sizes, self.mixture.shares)
        if self.windows_per_epoch < global_batch:
            raise UserError(
                f"{' and '.join(self.mixture.names)}, split {split!r}: dataset has "
                f"{self.windows_per_epoch} windows of {context + 1} tokens, the batch needs "
                f"{global_batch}; lower train.global_batch or data.context, or add data"
            )
        self._context, self._batch, self._prefetch = context, global_batch, prefetch
        self._rows_R = np.arange(global_batch)[slice(None) if rows is None else rows]
        self._surplus = 0  # windows consumed beyond step·B, by steps of another batch size
        self._streams = [TokenStream(source, split) for source in self.mixture.sources]
        self._separators = _Separators(self.mixture) if document_mask else None

    def resumed(self, step: int, consumed: int) -> "TrainLoader":
        """Return a loader for a run that used `consumed` windows before `step`.

        Earlier steps may have had another batch size.
        """
        loader = copy.copy(self)
        loader._surplus = consumed - step * self._batch
        return loader

    @property
    def windows_per_epoch(self) -> int:
        """The number of windows in all sources together."""
        return sum(self.order.sizes)

    def consumed(self, step: int) -> int:
        """Return the number of windows drawn before `step`, over all processes."""
        return step * self._batch + self._surplus

    def epoch(self, step: int) -> float:
        """Return the windows drawn before `step` divided by those in all sources together."""
        return self.consumed(step) / self.windows_per_epoch

    def sources(self, step: int) -> dict[str, dict[str, float]]:
        """Return {name: {tokens, epoch}} of each source before `step`; tokens are targets."""
        counts = drawn(self.order.shares, self.consumed(step))
        return {
            name: {"tokens": windows * self._context, "epoch": windows / size}
            for name, windows, size in zip(
                self.mixture.names, counts, self.order.sizes, strict=True
            )
        }

    def windows(self, step: int) -> tuple[Int64[np.ndarray, " R"], Int64[np.ndarray, " R"]]:
        """Return (source, window within the source's stream) of each row of a batch."""
        return self.order.windows(self.consumed(step) + self._rows_R)

    def batch(self, step: int) -> Batch:
        """Return {"tokens"} of one step, with "segments" (document numbers) if masked.

        Raises:
          UserError: a token id lies outside the tokenizer's vocabulary.
        """
        return {name: array_SRT[0] for name, array_SRT in self._block(step, 1).items()}

    def iterate(self, start_step: int) -> Generator[Batch]:
        """Yield batches from `start_step` on, prefetched; `close()` ends grain's thread."""
        import grain  # takes a second to import

        fitting = _BLOCK_BYTES // (len(self._rows_R) * (self._context + 1) * 4)
        steps = min(max(1, fitting), _BLOCK_STEPS)
        ahead = max(-(-self._prefetch // steps), _BLOCKS if fitting else 0)
        # One thread: files are memory-mapped, and more threads would only compete for the GIL.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead)
        starts = grain.MapDataset.range(start_step, _NO_LAST_STEP, steps)
        blocks = starts.map(lambda step: self._block(step, steps)).to_iter_dataset(options)
        return _batches(iter(blocks))

    def _block(self, step: int, steps: int) -> dict[str, Int32[np.ndarray, "S R J+1"]]:
        """Make the batches of consecutive steps in one array, since NumPy's cost is per call."""
        number_SR = self.consumed(step + np.arange(steps))[:, None] + self._rows_R
        source_N, window_N = self.order.windows(number_SR.ravel())
        tokens_NT = self._gather(source_N, window_N * self._context)
        if tokens_NT.max() >= self.mixture.vocab_size:
            self._refuse(source_N, window_N, tokens_NT)
        made = {"tokens": tokens_NT}
        if self._separators is not None:
            made["segments"] = self._separators.segments(tokens_NT)
        shape = (*number_SR.shape, self._context + 1)
        return {name: array_NT.reshape(shape) for name, array_NT in made.items()}

    def _gather(self, source_N: np.ndarray, start_N: np.ndarray) -> Int32[np.ndarray, "N J+1"]:
        length = self._context + 1
        if len(self._streams) == 1:
            return self._streams[0].gather(start_N, length)
        tokens_NT = np.empty((len(start_N), length), np.int32)
        for source, stream in enumerate(self._streams):
            row_M = np.flatnonzero(source_N == source)
            tokens_NT[row_M] = stream.gather(start_N[row_M], length)
        return tokens_NT

    def _refuse(self, source_N: np.ndarray, window_N: np.ndarray, tokens_NT: np.ndarray) -> None:
        limit = self.mixture.vocab_size
        row, column = np.argwhere(tokens_NT >= limit)[0]
        index = int(window_N[row]) * self._context + int(column)
        raise UserError(
            f"{self._streams[source_N[row]].locate(index)}: id {tokens_NT[row, column]} does not "
            f"fit the tokenizer's vocabulary of {limit}"
        )


def _batches(blocks) -> Generator[Batch]:
    try:
        for block in blocks:
            for place in range(len(block["tokens"])):
                yield {name: array_SRT[place] for name, array_SRT in block.items()}
    finally:
        blocks.close()


def eval_batches(
    dataset: Dataset,
    split: str,
    *,
    context: int,
    batch: int,
    limit: int | None = None,
    document_mask: bool = False,
    rows: Int64[np.ndarray, " R"] | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """Yield a whole split in order; every token but its stream's first is a target exactly once.

    Batches are {"tokens": int32 [B, J+1], "weights": float32 [B, J]} and "segments" under
    `document_mask`; weight 1 marks a real target, 0 the padding of the last window and batch.
    Yields at most `limit` batches, and only the given `rows` of each.

    Raises:
      UserError: when called, if the split is missing or, unless it is one source of several,
        smaller than a window.
    """
    if not dataset.source:
        _require_window(dataset, split, context)
    separators = _Separators(single(dataset)) if document_mask else None
    stream = TokenStream(dataset, split)
    starts = range(0, len(stream) - 1, context * batch)[:limit]
    rows_R = np.arange(batch) if rows is None else rows
    return (_eval_batch(stream, start, context, rows_R, separators) for start in starts)


def _eval_batch(
    stream: TokenStream, start: int, context: int, rows_R: np.ndarray, separators
) -> dict[str, np.ndarray]:
    tokens_RT = np.zeros((len(rows_R), context + 1), np.int32)
    weights_RJ = np.zeros((len(rows_R), context), np.float32)
    for place, row in enumerate(rows_R):
        first = start + int(row) * context
        count = min(context + 1, len(stream) - first)
        if count < 2:
            continue
        tokens_RT[place, :count] = stream.read(first, count)
        weights_RJ[place, : count - 1] = 1.0
    result = {"tokens": tokens_RT, "weights": weights_RJ}
    if separators is not None:
        result["segments"] = separators.segments(tokens_RT)
    return result


class _Separators:
    """Finds the documents in windows by their separators."""

    def __init__(self, mixture: Mixture):
        before, after = mixture.load_tokenizer().separator_ids(mixture.separator)
        self._first = before[0] if before else None
        self._last = after[0] if after else None

    def segments(self, tokens_BT: Integer[np.ndarray, "B T"]) -> Int32[np.ndarray, "B T"]:
        """Number the documents of each window; one starts at its bos, or else after an eos."""
        if self._first is not None:
            starts_BT = tokens_BT == self._first
        else:
            starts_BT = np.zeros(tokens_BT.shape, bool)
            starts_BT[:, 1:] = tokens_BT[:, :-1] == self._last
        return np.cumsum(starts_BT, axis=1, dtype=np.int32)


def _require_window(dataset: Dataset, split: str, context: int) -> None:
    tokens = dataset.split(split).tokens
    if tokens < context + 1:
        raise UserError(
            f"{dataset.name}, split {split!r}: {tokens} tokens are fewer than one window of "
            f"data.context + 1 = {context + 1}"
        )
