"""Batches of token windows: shuffled for training, in order for evaluation.

B windows a batch · R of its rows in this process · S steps · J targets a window (J+1 tokens)

Training windows are numbered n = step·B + row through the whole run. Number n goes to source s of
the mixture as its window i (see `Mixture.choose`); with W windows in the source that is epoch
i // W, place i % W of the epoch's own permutation. Epochs follow each other without a gap, so no
window is dropped at their borders, and a batch depends on nothing but (seed, step, B): not on the
number of processes, nor on when the run was resumed. A run that resumes with another B goes on at
the first number that it has not consumed (`TrainLoader.go_on`): none comes twice, none is left out.
"""

import collections
import functools
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int32, Int64, Integer

from cem_jax.data.dataset.mixture import Mixture, single
from cem_jax.data.dataset.shuffle import hashed, permuted
from cem_jax.data.dataset.store import Dataset, TokenStream, num_windows
from cem_jax.errors import UserError

_BLOCK_WINDOWS = 8192  # window numbers computed at once
_ELEMENT_BYTES, _ELEMENT_BATCHES = 8 << 20, 32  # made together at most
_ELEMENTS = 4  # made ahead, as long as they are no larger
_STEPS = 1 << 60  # a length for grain: more steps than any run has


class TrainLoader:
    """Shuffled windows of a dataset or mixture, as a pure function of (seed, step).

    `rows` are the rows of the global batch that this process reads, in order; None: all. Raises
    UserError when the split is missing, smaller than a window, or has fewer windows than a batch.
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
        self._context = context
        self._batch = global_batch
        self._seed = seed
        self._prefetch = prefetch
        self._rows_R = np.arange(global_batch, dtype=np.int64)[
            slice(None) if rows is None else rows
        ]
        windows = []
        for source in self.mixture.sources:
            _require_window(source, split, context)
            windows.append(num_windows(source.split(split).tokens, context))
        self._windows_of = windows
        if self.windows_per_epoch < global_batch:
            raise UserError(
                f"{' and '.join(self.mixture.names)}, split {split!r}: dataset has "
                f"{self.windows_per_epoch} windows of {context + 1} tokens, the batch needs "
                f"{global_batch}; lower train.global_batch or data.context, or add data"
            )
        self._offset = 0  # of window numbers, against step·B
        self._block_steps = max(1, _BLOCK_WINDOWS // max(1, len(self._rows_R)))
        self._block = functools.lru_cache(maxsize=2)(self._draw_block)
        self._streams = [TokenStream(source, split) for source in self.mixture.sources]
        self._separators = _Separators(self.mixture) if document_mask else None

    @property
    def windows_per_epoch(self) -> int:
        """Windows of all sources together."""
        return sum(self._windows_of)

    def go_on(self, step: int, consumed: int) -> None:
        """Let `step` begin with window number `consumed`: what earlier steps, of whatever batch,
        did not take."""
        self._offset = consumed - step * self._batch
        self._block.cache_clear()

    def consumed(self, step: int) -> int:
        """Windows drawn before `step`, over all processes."""
        return step * self._batch + self._offset

    def epoch(self, step: int) -> float:
        """Windows drawn before `step` over windows there are; in mixtures, over all sources."""
        return self.consumed(step) / self.windows_per_epoch

    def sources(self, step: int) -> dict[str, dict[str, float]]:
        """{name: {tokens, epoch}} of each source before `step`; tokens counts targets."""
        drawn = self.mixture.drawn(self.consumed(step))
        return {
            name: {"tokens": windows * self._context, "epoch": windows / there}
            for name, windows, there in zip(
                self.mixture.names, drawn, self._windows_of, strict=True
            )
        }

    def windows(self, step: int) -> tuple[Int64[np.ndarray, " R"], Int64[np.ndarray, " R"]]:
        """(source, window within the source's stream) of each row of a batch."""
        block, place = divmod(step, self._block_steps)
        source_SR, window_SR = self._block(block)
        return source_SR[place], window_SR[place]

    def _draw_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """`windows` of consecutive steps at once: NumPy costs microseconds a call, not a number."""
        steps_S = np.arange(block * self._block_steps, (block + 1) * self._block_steps)
        number_SR = steps_S[:, None] * self._batch + self._offset + self._rows_R
        source_N, within_N = self.mixture.choose(number_SR.ravel())
        size_N = np.asarray(self._windows_of, np.int64)[source_N]
        epoch_N, place_N = np.divmod(within_N, size_N)
        key_N = hashed(self._seed, source_N, epoch_N)
        window_N = np.empty_like(place_N)
        for source, size in enumerate(self._windows_of):
            own = source_N == source
            window_N[own] = permuted(place_N[own], size, key_N[own])
        return source_N.reshape(number_SR.shape), window_N.reshape(number_SR.shape)

    def batch(self, step: int) -> dict[str, Int32[np.ndarray, "R J+1"]]:
        """{"tokens"} of one step, with "segments" (document numbers) under `document_mask`.

        Raises UserError where a token id lies outside the tokenizer's vocabulary.
        """
        return self.batches(step, 1)[0]

    def batches(self, step: int, count: int) -> list[dict[str, Int32[np.ndarray, "R J+1"]]]:
        """The batches of consecutive steps, cut from one array."""
        windows = [self.windows(s) for s in range(step, step + count)]
        source_N, window_N = (np.concatenate(arrays) for arrays in zip(*windows, strict=True))
        tokens_NT = self._gather(source_N, window_N * self._context)
        if tokens_NT.max(initial=0) >= self.mixture.vocab_size:
            self._refuse(source_N, window_N, tokens_NT)
        made = {"tokens": tokens_NT}
        if self._separators is not None:
            made["segments"] = self._separators.segments(tokens_NT)
        shape = (count, -1, self._context + 1)
        made = {name: array_NT.reshape(shape) for name, array_NT in made.items()}
        return [{name: array[i] for name, array in made.items()} for i in range(count)]

    @property
    def batch_bytes(self) -> int:
        """Of the tokens of a batch in this process."""
        return len(self._rows_R) * (self._context + 1) * 4

    def _gather(self, source_R: np.ndarray, start_R: np.ndarray) -> Int32[np.ndarray, "R J+1"]:
        length = self._context + 1
        if len(self._streams) == 1:
            return self._streams[0].gather(start_R, length)
        tokens_RT = np.empty((len(start_R), length), np.int32)
        for source, stream in enumerate(self._streams):
            row_N = np.flatnonzero(source_R == source)
            tokens_RT[row_N] = stream.gather(start_R[row_N], length)
        return tokens_RT

    def iterate(self, start_step: int) -> "BatchIterator":
        """(step, batch) from `start_step` on, made ahead by grain's threads."""
        return BatchIterator(self, start_step, self._prefetch)

    def _refuse(self, source_R: np.ndarray, window_R: np.ndarray, tokens_RT: np.ndarray) -> None:
        limit = self.mixture.vocab_size
        row, column = np.argwhere(tokens_RT >= limit)[0]
        index = int(window_R[row]) * self._context + int(column)
        raise UserError(
            f"{self._streams[source_R[row]].locate(index)}: id {tokens_RT[row, column]} does not "
            f"fit the tokenizer's vocabulary of {limit}"
        )


class BatchIterator(Iterator[tuple[int, dict[str, np.ndarray]]]):
    """Batches in step order from grain, whose element is some megabytes of whole batches.

    A batch takes less than a millisecond: handing each over by itself would take as long, and
    memory of a few megabytes is had in large pages.
    """

    def __init__(self, loader: TrainLoader, start_step: int, prefetch: int):
        import grain  # takes a second to import

        fitting = _ELEMENT_BYTES // max(1, loader.batch_bytes)
        count = min(max(1, fitting), _ELEMENT_BATCHES)
        ahead = max(-(-prefetch // count), _ELEMENTS if fitting else 0)
        # One thread: batches come off memory-mapped files, and more only fight over the GIL.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead)
        source = _BatchSource(loader, start_step, count)
        self._step = start_step
        self._elements = iter(grain.MapDataset.source(source).to_iter_dataset(options))
        self._made: collections.deque[dict[str, np.ndarray]] = collections.deque()

    def __next__(self) -> tuple[int, dict[str, np.ndarray]]:
        if not self._made:
            self._made.extend(next(self._elements))
        step, self._step = self._step, self._step + 1
        return step, self._made.popleft()

    def close(self) -> None:
        """Stop making batches and end grain's thread."""
        self._elements.close()


class _BatchSource:
    """grain's random-access source: element i is the batches of steps start + i·count and on."""

    def __init__(self, loader: TrainLoader, start: int, count: int):
        self._loader, self._start, self._count = loader, start, count

    def __len__(self) -> int:
        return _STEPS

    def __getitem__(self, index: int) -> list[dict[str, np.ndarray]]:
        return self._loader.batches(self._start + index * self._count, self._count)


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
    """A whole split in order, every token but its stream's first a target exactly once.

    Yields {"tokens": int32 [B, J+1], "weights": float32 [B, J]} and "segments" under
    `document_mask`; weight 1 marks a real target, 0 the padding of the last window and batch.
    At most `limit` batches; of each only `rows`, where given. Raises UserError, at the call, when
    the split is missing or, unless it is one source of several, smaller than a window.
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
        stream.read_into(first, tokens_RT[place, :count])
        weights_RJ[place, : count - 1] = 1.0
    result = {"tokens": tokens_RT, "weights": weights_RJ}
    if separators is not None:
        result["segments"] = separators.segments(tokens_RT)
    return result


class _Separators:
    """Finds the documents within windows."""

    def __init__(self, mixture: Mixture):
        before, after = mixture.load_tokenizer().separator_ids(mixture.separator)
        self._first = before[0] if before else None
        self._last = after[0] if after else None

    def segments(self, tokens_BT: Integer[np.ndarray, "B T"]) -> Int32[np.ndarray, "B T"]:
        """Documents counted within each window: one starts at its bos, or else after an eos."""
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
            f"{dataset.name}, split {split!r}: {tokens} tokens are less than one window of "
            f"data.context + 1 = {context + 1}"
        )
