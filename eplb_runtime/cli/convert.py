"""Convert placements and loads to and from the serving engines' formats.

examples:
  eplb-runtime convert placement.json sglang.json --to sglang --dense-layers 3   # for --init-expert-location
  eplb-runtime convert placement.json eplb.yaml --dense-layers 3                 # for TensorRT-LLM's load_balancer
  eplb-runtime convert sglang.json placement.json --ranks 32 --dense-layers 3
  eplb-runtime convert expert_distribution_recorder_1.pt load.npz --dense-layers 3
  eplb-runtime convert sample load.npz                                           # the series that comes along
"""

import argparse
from dataclasses import asdict

from .arguments import DENSE_LAYERS, option, positive
from .printing import print_json

FORMATS = "eplb-runtime, sglang, vllm or tensorrt-llm (default: of .yaml tensorrt-llm, else eplb-runtime)"
OPTIONS = [
    option("source", "IN", str, "a placement or a load; known by its content"),
    option("destination", "OUT", str, "the file to write"),
    option("--to", "FORMAT", str, FORMATS),
    option("--ranks", "R", positive, "EP size, which most engines' maps do not say"),
    DENSE_LAYERS,
]


def run(arguments: argparse.Namespace) -> None:
    from ..tools.formats.convert import convert

    source, destination, dense = arguments.source, arguments.destination, arguments.dense_layers
    done = convert(source, destination, to=arguments.to, num_ranks=arguments.ranks, dense_layers=dense)
    if arguments.json:
        return print_json(asdict(done))
    axes = ("layers", "slots") if done.kind == "placement" else ("windows", "layers", "experts")
    shape = " x ".join(f"{size} {axis}" for size, axis in zip(done.shape, axes, strict=True))
    print(f"{done.kind} of {shape}: {done.source_format} -> {done.format}, written to {destination}")
    if done.filled_slots:
        print(f"{done.filled_slots} empty replica slots were given a copy: {done.format} knows no empty slots")
