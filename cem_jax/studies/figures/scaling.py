"""Comparisons of arms with Llama over model sizes, at equal parameters, FLOPs and seconds.

Each arm is taken at its best learning rate. Llama's losses over its sizes give a power law
L(C) = E + A·C^−α of each cost C: training FLOPs, parameters, seconds. An arm of cost C_a at a size
where Llama's cost is C_s differs from Llama by Δ, paired by seed. Its loss is read as L(C_s) + Δ,
so that effects common to a seed or a size cancel. Then

* the difference at equal cost is L(C_s) + Δ − L(C_a);
* the multiplier is m with L(m·C_a) = L(C_s) + Δ: Llama needs m times the arm's cost for its loss.

Intervals hold 95 % of a parametric bootstrap: Δ and Llama's losses are drawn again with Student's
noise, whose spread over seeds is pooled over arms and sizes, and Llama's curve is fitted to each
draw. Llama's noise is at least the fit's residual. Without two seeds anywhere there is none.

Axes: D draws, the first of which is the measurement; S sizes; G exponents tried.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from jaxtyping import Float
from scipy.interpolate import Akima1DInterpolator
from scipy.stats import nct
from scipy.stats import t as student

from cem_jax.studies.figures.grid import Sweep
from cem_jax.studies.figures.results import Curve, Point, curves

COSTS = ("training_flops", "parameters", "seconds")
DRAWS = 1000
WORTH_DECIDING = 0.005  # nats
POWER = 0.8


@dataclass(frozen=True)
class Best:
    """An arm of one size at its best learning rate.

    Attributes:
      rates: the number that ran and did not diverge; of one or two, the better is taken.
      at_edge: the best rate may lie beyond the rates that ran.
      losses: by seed, in nats.
      seconds: the median over all runs of the arm and size; None where some have none.
    """

    size: str
    arm: str
    learning_rate: float
    rates: int
    at_edge: bool
    losses: Mapping[int, float]
    training_flops: float
    parameters: float
    seconds: float | None

    @property
    def loss(self) -> float:
        """Return the mean over seeds."""
        return fmean(self.losses.values())


def best_of(curve: Curve, points: Sequence[Point]) -> Best | None:
    """Return an arm of one size at its best rate; None if it diverged at all rates.

    Args:
      curve: the curve of the seeds that ran at all rates.
      points: the points with all seeds. A seed that ran only at a rate near the best counts too:
        its distance from the curve at the best rate is taken to be the same as there.
    """
    finite = curve.finite
    if not finite:
        return None
    lowest = min(finite, key=lambda p: p.perplexity)
    rate = curve.best.learning_rate if curve.best else lowest.learning_rate
    loss = {p.learning_rate: fmean(row.loss for row in p.rows) for p in finite}
    at_best = _interpolated(loss, rate) if curve.best else loss[rate]
    seconds = [row.seconds for point in points for row in point.rows]
    first = curve.points[0]
    return Best(
        size=first.size,
        arm=first.arm.name,
        learning_rate=rate,
        rates=len(finite),
        at_edge=curve.best.at_edge if curve.best else True,
        losses={seed: at_best + off for seed, off in _deviations(points, loss, rate).items()},
        training_flops=first.training_flops,
        parameters=first.parameters,
        seconds=None if None in seconds else median(seconds),
    )


def _deviations(
    points: Sequence[Point], losses: Mapping[float, float], rate: float
) -> dict[int, float]:
    """Return each seed's distance from the curve at the rate, measured at a nearby rate."""
    logs, one_hot = np.log([*losses]), np.eye(len(losses))
    weights = {r: np.interp(math.log(rate), logs, one_hot[i]) for i, r in enumerate(losses)}
    found: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        weight = weights.get(point.learning_rate, 0)
        for row in point.rows:
            if weight and math.isfinite(row.loss):
                off = row.loss - losses[point.learning_rate]
                found.setdefault(row.seed, []).append((weight, off))
    return {
        seed: sum(weight * off for weight, off in here) / sum(weight for weight, _ in here)
        for seed, here in sorted(found.items())
    }


def _interpolated(losses: Mapping[float, float], rate: float) -> float:
    """Interpolate the loss over the logarithm of the learning rate by Akima's method."""
    line = Akima1DInterpolator(np.log([*losses]), [*losses.values()])
    return float(line(math.log(rate)))


@dataclass(frozen=True)
class PowerLaw:
    """Power laws E + A·(C/reference)^−α, one per draw."""

    floor_D: Float[np.ndarray, " D"]
    scale_D: Float[np.ndarray, " D"]
    exponent_D: Float[np.ndarray, " D"]
    reference: float

    def loss(self, cost: float) -> Float[np.ndarray, " D"]:
        """Return each draw's loss at the cost."""
        return self.floor_D + self.scale_D * (cost / self.reference) ** -self.exponent_D

    def cost(self, loss_D: Float[np.ndarray, " D"]) -> Float[np.ndarray, " D"]:
        """Return each draw's cost for the loss: ∞ below its floor, NaN without a slope."""
        with np.errstate(all="ignore"):
            logs = np.log((loss_D - self.floor_D) / self.scale_D) / self.exponent_D
            cost_D = self.reference * np.exp(-logs)
        cost_D = np.where(loss_D <= self.floor_D, np.inf, cost_D)
        return np.where((self.scale_D > 0) & (self.exponent_D > 0), cost_D, np.nan)


def fit(cost_S: Float[np.ndarray, " S"], loss_DS: Float[np.ndarray, "D S"]) -> PowerLaw:
    """Fit a power law by least squares, 0 ≤ E and 0 ≤ A; through two sizes, with E = 0.

    E and A follow from α, which is searched for between 0.01 and 3.
    """
    reference = math.exp(float(np.mean(np.log(cost_S))))
    x_S = np.log(cost_S / reference)
    if len(cost_S) == 2:
        log_DS = np.log(loss_DS)
        exponent_D = -(log_DS[:, 1] - log_DS[:, 0]) / (x_S[1] - x_S[0])
        scale_D = np.exp(log_DS.mean(axis=1))
        return PowerLaw(np.zeros_like(scale_D), scale_D, exponent_D, reference)
    draws = np.arange(len(loss_DS))
    low_D, high_D = np.full(len(draws), math.log(0.01)), np.full(len(draws), math.log(3))
    for _ in range(6):  # each round narrows the range to a sixteenth
        exponent_DG = np.exp(np.linspace(low_D, high_D, 33, axis=1))
        floor_DG, scale_DG, error_DG = _least_squares(exponent_DG, x_S, loss_DS)
        best_D = np.argmin(error_DG, axis=1)
        low_D = np.log(exponent_DG[draws, np.maximum(best_D - 1, 0)])
        high_D = np.log(exponent_DG[draws, np.minimum(best_D + 1, 32)])
    chosen = draws, best_D
    return PowerLaw(floor_DG[chosen], scale_DG[chosen], exponent_DG[chosen], reference)


def _least_squares(
    exponent_DG: Float[np.ndarray, "D G"],
    x_S: Float[np.ndarray, " S"],
    loss_DS: Float[np.ndarray, "D S"],
) -> tuple[Float[np.ndarray, "D G"], Float[np.ndarray, "D G"], Float[np.ndarray, "D G"]]:
    """Return (E, A, sum of squares) for each exponent."""
    y_DGS = np.exp(-exponent_DG[..., None] * x_S)
    loss_DGS = loss_DS[:, None, :]
    from_mean_DGS = y_DGS - y_DGS.mean(axis=-1, keepdims=True)
    scale_DG = (from_mean_DGS * loss_DGS).sum(axis=-1) / (from_mean_DGS**2).sum(axis=-1)
    scale_DG = np.maximum(scale_DG, 0)
    floor_DG = loss_DGS.mean(axis=-1) - scale_DG * y_DGS.mean(axis=-1)
    through_0_DG = (y_DGS * loss_DGS).sum(axis=-1) / (y_DGS**2).sum(axis=-1)
    scale_DG = np.where(floor_DG < 0, through_0_DG, scale_DG)
    floor_DG = np.maximum(floor_DG, 0)
    error_DGS = floor_DG[..., None] + scale_DG[..., None] * y_DGS - loss_DGS
    return floor_DG, scale_DG, (error_DGS**2).sum(axis=-1)


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, whose ends are None where no seeds were repeated."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Comparison:
    """An arm of one size against Llama; differences in nats, negative where the arm is better.

    Attributes:
      rates, at_edge: as in Best.
      seeds: the number that both have.
      twin: against the Llama of the same size.
      equal_…: against Llama's curve where it costs as much as the arm; None without a curve.
      …_multiplier: how many times the arm's cost Llama needs for its loss; None without a curve.
    """

    figure: str
    size: str
    arm: str
    learning_rate: float
    rates: int
    at_edge: bool
    seeds: int
    loss: float
    twin: Estimate
    equal_parameters: Estimate | None
    equal_flops: Estimate | None
    equal_seconds: Estimate | None
    compute_multiplier: Estimate | None
    parameter_multiplier: Estimate | None


@dataclass(frozen=True)
class Power:
    """The differences that seeds can decide at a size.

    Attributes:
      spread: standard deviation of a difference paired by seed, pooled over arms.
      freedom: its degrees of freedom.
      seeds: the number that decides WORTH_DECIDING nats in four of five studies; None if > 1,000.
    """

    figure: str
    size: str
    spread: float
    freedom: int
    seeds: int | None


@dataclass(frozen=True)
class Scaling:
    """A figure's arms over model sizes.

    Attributes:
      llama: Llama at each size where it ran, smallest first.
      others: the arms at the sizes where Llama ran.
      laws: Llama's curve over each cost that was measured at more than one size.
      powers: one per size with repeated seeds.
      diverged: arms, with their sizes, that diverged at all learning rates.
    """

    llama: Sequence[Best]
    others: Sequence[Best]
    laws: Mapping[str, PowerLaw]
    comparisons: Sequence[Comparison]
    powers: Sequence[Power]
    diverged: Sequence[str]

    def of(self, arm: str) -> list[Comparison]:
        """Return the arm's comparisons, the smallest size first."""
        return [c for c in self.comparisons if c.arm == arm]

    @property
    def notes(self) -> list[str]:
        """Return notes for readers of the comparisons."""
        sizes = len(self.llama)
        if sizes == 1:
            curve = (
                "Llama ran at one size, so it has no curve: no multipliers, and no comparison at "
                "equal parameters, FLOPs or seconds"
            )
        elif sizes == 2:
            curve = "Llama's curve is a straight line between two sizes in logarithms: no floor"
        else:
            curve = f"Llama: {self.formula}"
        notes = [curve]
        if self.comparisons and self.comparisons[0].twin.low is None:
            notes.append("No arm shares two seeds with Llama, so there are no intervals")
        if any(c.rates < 3 for c in self.comparisons):
            notes.append("Arms with fewer than three learning rates are at the best of those")
        if self.diverged:
            notes.append(f"Diverged at all learning rates: {', '.join(self.diverged)}")
        return notes

    @property
    def formula(self) -> str:
        """Return Llama's loss as a formula in FLOPs."""
        law = self.laws["training_flops"]
        floor, scale, exponent = law.floor_D[0], law.scale_D[0], law.exponent_D[0]
        return f"loss = {floor:.3f} + {scale:.3f} · (FLOPs / {law.reference:.3g})^−{exponent:.3f}"


def scaling(sweep: Sweep, points: Iterable[Point]) -> Scaling | None:
    """Compare a figure's arms with its baseline over sizes; None if there is nothing to compare.

    Points without rows are skipped.
    """
    points = list(points)
    found, diverged = _best(points)
    llama = {best.size: best for best in found if best.arm == sweep.baseline}
    others = [best for best in found if best.arm != sweep.baseline and best.size in llama]
    if not others:
        return None
    noise = _Noise(llama, others)
    ordered = sorted(llama.values(), key=lambda best: best.training_flops)
    laws = dict(_laws(ordered, noise))
    others.sort(key=lambda best: ordered.index(llama[best.size]))
    pairs = [(best, llama[best.size]) for best in others]
    return Scaling(
        llama=ordered,
        others=others,
        laws=laws,
        comparisons=[
            _compare(sweep.name, best, twin, laws, noise)
            for best, twin in pairs
            if best.losses.keys() & twin.losses.keys()
        ],
        powers=[power for size in ordered for power in _power(sweep.name, size, others)],
        diverged=diverged,
    )


def _best(points: Sequence[Point]) -> tuple[list[Best], list[str]]:
    """Return (each size's arms at their best rates, those that diverged)."""
    found, diverged = [], []
    for curve in curves(points):
        first = curve.points[0]
        own = [p for p in points if (p.size, p.arm.name) == (first.size, first.arm.name)]
        best = best_of(curve, own)
        if best:
            found.append(best)
        else:
            diverged.append(f"{first.arm.name} at {first.size}")
    return found, diverged


def paired(best: Best, twin: Best) -> list[float]:
    """Return the differences in loss for the seeds that both have."""
    seeds = sorted(best.losses.keys() & twin.losses.keys())
    return [best.losses[seed] - twin.losses[seed] for seed in seeds]


def pooled(groups: Iterable[Iterable[float]]) -> tuple[float, int]:
    """Return the standard deviation within groups and its degrees of freedom, possibly 0."""
    squares, freedom = 0.0, 0
    for values in map(list, groups):
        if values:
            squares += sum((value - fmean(values)) ** 2 for value in values)
            freedom += len(values) - 1
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom


class _Noise:
    """Random draws of the results that other seeds might have given."""

    def __init__(self, llama: Mapping[str, Best], others: Sequence[Best]):
        self._random = np.random.default_rng(0)
        self._pairs = pooled(paired(best, llama[best.size]) for best in others)
        self._llama = pooled(best.losses.values() for best in llama.values())
        self.draws = DRAWS if self._pairs[1] else 0

    def difference(self, values: Sequence[float]) -> Float[np.ndarray, " D"]:
        """Return the mean of paired differences, as measured and as drawn."""
        return self._drawn(fmean(values), *self._pairs, len(values))

    def losses(self, best: Best, residual: float) -> Float[np.ndarray, " D"]:
        """Return Llama's loss at a size; `residual` is the spread about its curve."""
        spread, freedom = self._llama
        spread = max(spread, residual * math.sqrt(len(best.losses)))
        return self._drawn(best.loss, spread, freedom, len(best.losses))

    def _drawn(self, mean: float, spread: float, freedom: int, seeds: int) -> np.ndarray:
        noise_D = np.zeros(1 + self.draws)
        if self.draws:
            drawn_D = self._random.standard_t(max(freedom, 1), self.draws)
            noise_D[1:] = spread / math.sqrt(seeds) * drawn_D
        return mean + noise_D


def _laws(llama: Sequence[Best], noise: _Noise) -> Iterator[tuple[str, PowerLaw]]:
    loss_S = np.array([best.loss for best in llama])
    for name in COSTS:
        costs = [getattr(best, name) for best in llama]
        if len(costs) < 2 or None in costs or len(set(costs)) < len(costs):
            continue
        cost_S, residual = np.array(costs, float), 0.0
        if len(costs) > 3:  # two or three sizes lie on their curve
            law = fit(cost_S, loss_S[None])
            errors = [law.loss(cost)[0] - loss for cost, loss in zip(costs, loss_S, strict=True)]
            residual = math.sqrt(sum(error**2 for error in errors) / (len(costs) - 3))
        loss_DS = np.stack([noise.losses(best, residual) for best in llama], axis=1)
        yield name, fit(cost_S, loss_DS)


def _compare(
    figure: str, best: Best, twin: Best, laws: Mapping[str, PowerLaw], noise: _Noise
) -> Comparison:
    values = paired(best, twin)
    difference_D = noise.difference(values)

    def over(cost: str, measure: Callable[..., np.ndarray]) -> Estimate | None:
        law, mine = laws.get(cost), getattr(best, cost)
        if law is None or not mine:
            return None
        return _estimate(measure(law, law.loss(getattr(twin, cost)) + difference_D, mine))

    equal = lambda law, loss_D, cost: loss_D - law.loss(cost)
    multiplier = lambda law, loss_D, cost: law.cost(loss_D) / cost
    return Comparison(
        figure=figure,
        size=best.size,
        arm=best.arm,
        learning_rate=best.learning_rate,
        rates=best.rates,
        at_edge=best.at_edge,
        seeds=len(values),
        loss=best.loss,
        twin=_estimate(difference_D),
        equal_parameters=over("parameters", equal),
        equal_flops=over("training_flops", equal),
        equal_seconds=over("seconds", equal),
        compute_multiplier=over("training_flops", multiplier),
        parameter_multiplier=over("parameters", multiplier),
    )


def _estimate(value_D: Float[np.ndarray, " D"]) -> Estimate | None:
    """Return the first value with the interval of the others; None if it is NaN."""
    if math.isnan(value_D[0]):
        return None
    if len(value_D) == 1:
        return Estimate(float(value_D[0]), None, None)
    low, high = np.nanquantile(value_D[1:], (0.025, 0.975), method="inverted_cdf")
    return Estimate(float(value_D[0]), float(low), float(high))


def _power(figure: str, twin: Best, others: Sequence[Best]) -> Iterator[Power]:
    spread, freedom = pooled(paired(best, twin) for best in others if best.size == twin.size)
    if freedom:
        seeds = seeds_to_decide(WORTH_DECIDING, spread)
        yield Power(figure, twin.size, spread, freedom, seeds)


def seeds_to_decide(nats: float, spread: float, power: float = POWER) -> int | None:
    """Return the number of seeds that decide a difference with this power; None above 1,000.

    `spread`: the standard deviation of one seed's paired difference. A difference is decided when
    Student's 95 % interval of its mean excludes 0.
    """
    if not spread:
        return 2
    for seeds in range(2, 1001):
        edge, shift = student.ppf(0.975, seeds - 1), nats / spread * math.sqrt(seeds)
        if nct.sf(edge, seeds - 1, shift) >= power:
            return seeds
    return None
