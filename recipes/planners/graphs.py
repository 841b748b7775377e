"""Plans a graph of layers in the format of Piper's public inputs, which the runner's own models cannot have.

    python -m runner.recipes.planners.graphs FILE [--devices N] [--memory BYTES] [--microbatches N] [--exact]

Prints the seconds of the slowest stage for a micro-batch and a line for each stage.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.config.units import format_bytes, parse_bytes
from runner.plan.planners.published.piper_graph import LayerGraph, LayerWay, search_graph

__all__ = ["graph_of", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan a graph and print its stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--devices", type=int, help="default: maxDevices of the file")
    parser.add_argument("--memory", help="of a device, such as 8GiB; default: maxMemoryPerDevice of the file")
    parser.add_argument("--microbatches", type=int, help="of a step; default: mbsInBatch of the file")
    parser.add_argument("--exact", action="store_true", help="solve each stage's knapsack exactly")
    asked = parser.parse_args(arguments)
    document = json.loads(asked.file.read_text(encoding="utf-8"))
    changes = {
        "maxDevices": asked.devices,
        "maxMemoryPerDevice": parse_bytes(asked.memory) if asked.memory else None,
        "mbsInBatch": asked.microbatches,
    }
    graph, names = graph_of(document | {key: value for key, value in changes.items() if value is not None})
    found = search_graph(graph, exact=asked.exact)
    if found is None:
        print(f"nothing fits {graph.devices} devices of {format_bytes(graph.memory)}")
        return
    seconds, stages = found
    print(f"{seconds:.9g} for a micro-batch, {len(stages)} stages")
    for stage in stages:
        where = f"{stage.replicas} replicas in {stage.tensor} parts"
        print(f"{len(stage.layers)} layers from {names[stage.layers[0]]}: {where}, {sum(stage.ways)} by the second way")


def graph_of(document: Mapping[str, Any]) -> tuple[LayerGraph, list[str]]:
    """The graph of a document in the format of Piper's public inputs, and the names of its layers.

    Seconds are in the file's own unit; the file's bandwidth is in bytes for each of it.
    """
    nodes = document["nodes"]
    place = {node["id"]: at for at, node in enumerate(nodes)}

    def crossing(sizes: Mapping[str, float]) -> dict[int, float]:
        return {place[int(other)]: size for other, size in sizes.items()}

    def way(of: Mapping[str, Any]) -> LayerWay:
        seconds, weight, saved, held = (
            float(of[key]) for key in ("timePerSample", "parameterSize", "memoryUsageA", "memoryUsageB")
        )
        return LayerWay(seconds, weight, saved, held, crossing(of["syncTimeFw"]), crossing(of["syncTimeBw"]))

    layers = tuple({int(parts): tuple(map(way, ways)) for parts, ways in node["TMPCs"].items()} for node in nodes)
    edges = {(place[edge["sourceId"]], place[edge["destId"]]): edge["communicationCost"] for edge in document["edges"]}
    keys = "maxDevices", "maxMemoryPerDevice", "bandwidth", "mbsInBatch"
    graph = LayerGraph(layers, edges, *(document[key] for key in keys))
    return graph, [str(node.get("name", node["id"])) for node in nodes]


if __name__ == "__main__":
    main()
