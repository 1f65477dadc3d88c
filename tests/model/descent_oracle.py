"""The fields of `energies` lines, in NumPy and float64, from the definitions in docs/metrics.md.

States are the oracle's, at T = 0, 1, …; slopes of the energies are central differences.

Shapes: J positions · D model dim · K heads.
"""

import dataclasses

import numpy as np
import oracle
from scipy.special import spence, xlogy

NUDGE = 1e-5


def descents(config, parameters, tokens, segments=None):
    """Return {"attention": {field: [L, …]}, "mlp": …} for tokens [B, J]."""
    x_BJD = parameters["embedding"][tokens]
    rows = range(len(tokens))
    layers = []
    for index in range(config.layers):
        layer, seen = oracle.layer_of(parameters, index), {}
        for name in ("attention", "mlp"):
            own = [None if segments is None or name == "mlp" else segments[b] for b in rows]
            found = [_sequence(config, name, layer[name], x_BJD[b], own[b]) for b in rows]
            x_BJD = np.stack([states[-1] for states, _ in found])
            seen[name] = _summary(config, name, layer[name], [values for _, values in found])
        layers.append(seen)
    fields = lambda name: layers[0][name]
    return {
        name: {field: np.stack([layer[name][field] for layer in layers]) for field in fields(name)}
        for name in ("attention", "mlp")
    }


def _sequence(config, name, p, x_JD, segments):
    """Return states [T+1, J, D] and, per token, energies, slopes, entropy and self-mass."""
    states = _states(config, name, p, x_JD, segments)
    h_JD = oracle._rms(x_JD, p["norm"], config)
    energy = lambda x: _energy(config, name, p, _normed(config, p, x), h_JD, segments)
    energies = np.stack([energy(x) for x in states])
    slopes = [
        (energy(x + NUDGE * d) - energy(x - NUDGE * d)) / (2 * NUDGE)
        for x, d in zip(states[:-1], np.diff(states, axis=0), strict=True)
    ]
    values = {"energies": energies, "slopes": np.stack(slopes), "updates": np.diff(states, axis=0)}
    if name == "attention":
        alpha = np.stack([_alpha(config, p, x, h_JD, segments) for x in states[:-1]])
        values["entropy"] = -xlogy(alpha, alpha).sum(-1)  # [T, K, J]
        values["self_mass"] = np.diagonal(alpha, axis1=-2, axis2=-1)
    return states, values


def _summary(config, name, p, sequences):
    gather = lambda field: np.stack([values[field] for values in sequences], axis=1)  # [T, B, …]
    settings = getattr(config, name)
    energies, updates = gather("energies"), gather("updates")
    rise, norms = np.diff(energies, axis=0), np.linalg.norm(gather("updates"), axis=-1)
    eta = p["eta"] if settings.learn_step_size else settings.step_size
    cosine = (updates[1:] * updates[:-1]).sum(-1) / (norms[1:] * norms[:-1])
    seen = {
        "energy": energies.mean((1, 2)),
        "energy_change": rise.mean((1, 2)),
        "rise_fraction": (rise > 0).mean((1, 2)),
        "descent_ratio": rise.sum((1, 2)) / gather("slopes").sum((1, 2)),
        "force_norm": norms.mean((1, 2)) / abs(eta),
        "cosine": cosine.mean((1, 2)),
    }
    if name == "attention":
        seen |= {field: gather(field).mean((1, 2, 3)) for field in ("entropy", "self_mass")}
    if settings.preconditioner != "none":
        eigenvalues = np.linalg.eigvalsh(oracle._matrix(p["preconditioner"], settings, config.dim))
        seen["smallest_eigenvalue"] = eigenvalues.min()
        seen["largest_eigenvalue"] = eigenvalues.max()
    return seen


def _states(config, name, p, x_JD, segments):
    settings, states = getattr(config, name), []
    for steps in range(settings.steps + 1):
        stopped = dataclasses.replace(config, **{name: dataclasses.replace(settings, steps=steps)})
        run = oracle.mlp if name == "mlp" else oracle.attention
        states.append(run(stopped, p, x_JD, *([] if name == "mlp" else [segments])))
    return np.stack(states)


def _normed(config, p, x):
    if config.step_norm == "none":
        return x
    weight = {"shared": p["norm"], "separate": p.get("step_norm"), "weightless": 1.0}
    return oracle._rms(x, weight[config.step_norm], config)


def _energy(config, name, p, u_JD, h_JD, segments):
    """Return ε or ξ, [J]."""
    if name == "mlp":
        z = u_JD @ p["tied"].T
        phi = z * np.logaddexp(0, z) + spence(1 + np.exp(z))  # ∫ SiLU, with Li₂(−eᶻ)
        return -((h_JD @ p["multiplier"].T) * phi).sum(-1)
    scores = oracle._scores(oracle._products(u_JD, h_JD, p, config), p, config, segments)
    return -config.tau * np.logaddexp.reduce(scores, axis=-1).sum(0)


def _alpha(config, p, x_JD, h_JD, segments):
    """Return α, [K, J, J], at state x."""
    products = oracle._products(_normed(config, p, x_JD), h_JD, p, config)
    return oracle._softmax(products, p, config, segments)
