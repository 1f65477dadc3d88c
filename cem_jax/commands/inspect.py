"""`cem inspect`: parameters, FLOPs and memory of a configuration, beside its Llama twin."""

import argparse
from typing import Any

from cem_jax.commands.arguments import COUNT, add_config
from cem_jax.sharding.axes import LOGICAL_RULES


def add(commands: Any) -> None:
    command = commands.add_parser(
        "inspect", help="count parameters, FLOPs and memory, beside the Llama twin"
    )
    add_config(command)
    command.add_argument(
        "--devices",
        type=COUNT,
        metavar="N",
        help="shard the parameters over N devices; default: the fewest the mesh allows",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Print the tables and return their numbers. Raises what `summarise` raises."""
    from cem_jax.aot.summary import summarise
    from cem_jax.config import load_config

    summary = summarise(load_config(args.config, args.overrides), args.devices)
    print(rendered(summary))
    return summary


def rendered(summary: dict[str, Any]) -> str:
    """Format the summary as tables."""
    tables = [_parameter_table(summary), _twin_table(summary), _memory_table(summary)]
    training = summary["training"]
    if training is not None:
        tables.append(
            f"training   {training['steps']:,} steps, {training['tokens']:,} tokens, "
            f"{training['flops']:.3g} FLOPs"
        )
    if summary["notes"]:
        tables.append("\n".join(f"note: {note}" for note in summary["notes"]))
    return "\n\n".join(tables)


def _parameter_table(summary: dict[str, Any]) -> str:
    from cem_jax.text import aligned

    layers = summary["layers"]
    mesh = " × ".join(f"{axis} {size}" for axis, size in summary["mesh"].items() if size > 1)
    rows = [("parameter", "shape", "per layer", "total", "split over", "bytes per device")]
    for name, count in summary["parameters_by_module"].items():
        sharding = summary["shardings"][name]
        stacked = f"{count // layers:,}" if name.startswith("blocks.") else ""
        shape = " × ".join(map(str, sharding["shape"])) or "1"
        split = ", ".join("+".join(axes) or "·" for axes in sharding["partition"])
        held = f"{sharding['bytes_per_device']:,}"
        rows.append((name, shape, stacked, f"{count:,}", split, held))
    stacked = sum(n for p, n in summary["parameters_by_module"].items() if p.startswith("blocks."))
    held = sum(sharding["bytes_per_device"] for sharding in summary["shardings"].values())
    total = ("all", "", f"{stacked // layers:,}", f"{summary['parameters']:,}", "", f"{held:,}")
    dtypes = " and ".join(sorted({s["dtype"] for s in summary["shardings"].values()}))
    batch, positions, heads = (
        "+".join(LOGICAL_RULES[dim]) for dim in ("batch", "sequence", "heads")
    )
    note = f"""
mesh: {mesh or "one device"}; all {dtypes}; the optimizer's two moments are sharded alike.
The batch is split over {batch}, activations also over {positions}, heads and M over {heads}."""
    return aligned([*rows, total], "<<>><>") + note


def _twin_table(summary: dict[str, Any]) -> str:
    from cem_jax.text import aligned

    parts = "flops_per_token_by_part"
    names = {
        "parameters": "parameters",
        "flops_per_token": "FLOPs per token, forward",
        **{f"{parts}.{part}": f"  {part}" for part in summary[parts]},
        "training_flops_per_token": "FLOPs per token, training",
        "folding_flops_per_pass": "FLOPs per pass, folding P",
        "cache_bytes_per_token": "decode cache, bytes per token",
    }
    rows = [("", "this model", "Llama twin", "ratio")]
    for key, words in names.items():
        ours, twins = _looked_up(summary, key), _looked_up(summary["llama_twin"], key)
        ratio = f"{ours / twins:.3f}" if twins else ""
        rows.append((words, f"{ours:,.0f}", f"{twins:,.0f}", ratio))
    return aligned(rows, "<>>>")


def _memory_table(summary: dict[str, Any]) -> str:
    from cem_jax.text import aligned, format_mib

    memory = summary["memory"]
    summed = memory["gradients"] > memory["parameters"]
    names = {"gradients": "gradients: a microbatch's and the sum"} if summed else {}
    rows = [("memory in training", "MiB")]
    rows += [(names.get(part, part), format_mib(size)) for part, size in memory.items()]
    return aligned(rows, "<>") + (
        "\nsummed over devices; activations: what JAX keeps of a microbatch for the backward pass,"
        "\nan estimate: XLA may keep less, and needs working memory besides"
    )


def _looked_up(values: dict[str, Any], dotted: str) -> Any:
    for name in dotted.split("."):
        values = values[name]
    return values
