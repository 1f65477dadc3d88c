"""The loss on a whole split, each target counted once.

Shapes: B windows at a time · J targets per window.
"""

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cem_jax.config import Config
from cem_jax.data.dataset.loader import eval_batches
from cem_jax.data.dataset.mixture import Mixture, single
from cem_jax.data.dataset.store import Dataset
from cem_jax.distributed.session import global_arrays, local_rows, together
from cem_jax.errors import UserError, collecting
from cem_jax.model import pure
from cem_jax.sharding.mesh import batch_sharding, batch_ways, in_mesh
from cem_jax.train.loss import sum_of_losses

_AHEAD = 2  # batches sent to the device before the first one's result is read


class Evaluator:
    """Evaluates parameters on one split, compiled once.

    The datasets of a mixture, and the named sources of each, are evaluated one by one.

    Args:
      batch: windows at a time, rounded up so that the mesh divides it; None: as many as in
        training.
      limit: at most `limit` × train.global_batch windows of each source, the same ones on every
        machine; None: the whole split.
      mesh: devices to spread the batch over; None: one device.

    Raises:
      UserError: a dataset does not have this split, or the split is smaller than a window.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset | Mixture,
        split: str,
        *,
        batch: int | None = None,
        limit: int | None = None,
        mesh: Mesh | None = None,
    ):
        self.split = split
        mixture = dataset if isinstance(dataset, Mixture) else single(dataset)
        self._config = config
        ways = 1 if mesh is None else batch_ways(mesh)
        rows = batch or config.train.microbatch or config.train.global_batch
        self._batch = -(-rows // ways) * ways
        windows = None if limit is None else limit * config.train.global_batch
        self._limit = None if windows is None else -(-windows // self._batch)
        if mesh is None:
            self._rows, self._place = None, jax.device_put
        else:
            self._rows = local_rows(batch_sharding(mesh), self._batch)
            self._place = partial(global_arrays, sharding=batch_sharding(mesh))
        self._sources = self._usable(mixture)
        dtype = jnp.dtype(config.train.compute_dtype)

        def sums(parameters, batch):
            losses = sum_of_losses(
                pure.bind(config.model, parameters),
                batch["tokens"],
                weights=batch["weights"],
                segments=batch.get("segments"),
                dtype=dtype,
                shards=ways,
            )
            return losses.nats, losses.weight

        sums = together("the validation", jax.jit(sums))
        self._sums = sums if mesh is None else in_mesh(mesh, sums)

    @property
    def measure(self) -> str:
        """Description of the common part of its evaluations: only equal ones are comparable."""
        windows = "all" if self._limit is None else f"{self._limit * self._batch}"
        return f"{self.split}: {windows} windows of {self._config.data.context} tokens"

    def batches(self, *, whole: bool = False) -> int:
        """Return the number of batches of one evaluation."""
        limit = None if whole else self._limit
        return sum(self._batches_of(source, limit) for source in self._sources)

    def __call__(
        self,
        parameters: pure.Parameters,
        report: Callable[[int], None] | None = None,
        *,
        whole: bool = False,
    ) -> dict[str, Any]:
        """Return the results of `with_common` without the common part's loss."""
        return self.with_common(parameters, report, whole=whole)[0]

    def with_common(
        self,
        parameters: pure.Parameters,
        report: Callable[[int], None] | None = None,
        *,
        whole: bool = False,
    ) -> tuple[dict[str, Any], float]:
        """Return the results, and the loss on the windows within `limit`, the common part.

        The results are {loss, perplexity, bits_per_byte, tokens, bytes}; with several sources also
        {sources: {name: the same}}, where the name is the directory or URL, and #source.

        `loss` is in nats per target and `tokens` counts targets. Bits per byte are
        Σ nats / ln 2 / UTF-8 bytes of the documents; they and `bytes` are None if `limit` cuts a
        split short. Where the tokenizer lost text, bits per byte are None and `unknown` counts the
        tokens that stand for it. `report` is called after each batch with the number of batches
        done. `whole` ignores the limit.
        """
        done = 0
        results = {}
        common = [0.0, 0.0]
        for source in self._sources:
            nats, tokens = 0.0, 0.0
            sums = self._batch_sums(parameters, source, whole)
            for number, (batch_nats, batch_tokens) in enumerate(sums):
                if self._limit is None or number < self._limit:
                    common = [common[0] + batch_nats, common[1] + batch_tokens]
                nats, tokens, done = nats + batch_nats, tokens + batch_tokens, done + 1
                if report is not None:
                    report(done)
            split = source.split(self.split)
            size = split.bytes if int(tokens) == split.tokens - 1 else None
            results[source.name] = (nats, int(tokens), size, split.unknown)
        return _overall(results), common[0] / common[1]

    def _batch_sums(self, parameters, source: Dataset, whole: bool):
        """Yield (nats, weight) of each batch, a few batches late so that the device never waits."""
        running = deque()
        for batch in self._batches(source, None if whole else self._limit):
            running.append(self._sums(parameters, self._place(batch)))
            if len(running) > _AHEAD:
                yield map(float, running.popleft())
        for sums in running:
            yield map(float, sums)

    def _batches(self, source: Dataset, limit: int | None):
        return eval_batches(
            source,
            self.split,
            context=self._config.data.context,
            batch=self._batch,
            limit=limit,
            document_mask=self._config.data.document_mask,
            rows=self._rows,
        )

    def _batches_of(self, source: Dataset, limit: int | None) -> int:
        targets = source.split(self.split).tokens - 1
        batches = -(-targets // (self._batch * self._config.data.context))
        return batches if limit is None else min(batches, limit)

    def _usable(self, mixture: Mixture) -> list[Dataset]:
        """Return the sources that have targets.

        Raises UserError with every dataset that lacks the split or has less than a window of it.
        """
        problems: list[str] = []
        for source in mixture.sources:
            with collecting(problems):
                if not source.source:
                    self._batches(source, self._limit)
        if problems:
            raise UserError(*problems)
        return [part for part in mixture.parts(self.split) if part.split(self.split).tokens > 1]


def _overall(results: dict[str, tuple[float, int, int | None, int]]) -> dict[str, Any]:
    """Return the results over all sources, from nats, tokens, bytes and unknown of each."""
    described = {name: _described(*result) for name, result in results.items()}
    if len(described) == 1:
        return next(iter(described.values()))
    nats, tokens, sizes, unknown = zip(*results.values(), strict=True)
    size = None if None in sizes else sum(sizes)
    return _described(sum(nats), sum(tokens), size, sum(unknown)) | {"sources": described}


def _described(nats: float, tokens: int, size: int | None, unknown: int) -> dict[str, Any]:
    loss = nats / tokens
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.nan if math.isnan(loss) else math.inf,
        "bits_per_byte": None if not size or unknown else nats / math.log(2) / size,
        "tokens": tokens,
        "bytes": size,
    } | ({"unknown": unknown} if unknown else {})
