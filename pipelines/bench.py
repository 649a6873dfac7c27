"""vitray bench BENCHMARK ...: speed against a named alternative, interleaved in one run, with spread and hardware."""

import argparse
import re
from pathlib import Path
from typing import Any

from pipelines.__main__ import run_verb
from vitray.config import load_run
from vitray.config.parsing import count_up_to, number_up_to

EXAMPLES = (
    "examples: vitray bench branches --models vit_s18x2_16 --batches 1,8; vitray bench ingest data/demo; "
    "vitray bench train --models vit_s12x1_16 --batch 64 --dtype bf16 --compile; "
    "vitray bench finetune --model vit_b12x1_16 --image-size 384"
)

MODES = ("default", "reduce-overhead", "max-autotune")
# ResNet-50 of the figure has no name here without a transformer behind it; torchvision's stands for it.
AXIAL = "attention=axial:class_token=false:pool=mean"
FIGURE_13 = f"vit_b12x1_32,vit_b24x1_32:{AXIAL},vit_b12x1_16,vit_b24x1_16:{AXIAL},torchvision/resnet50,axial_resnet50_l"
POLICIES = ("three_augment", "randaugment", "randaugment_torchvision")


def main(args: list[str]) -> dict[str, Any]:
    """Run one benchmark and return its rows."""
    options = vars(build_parser().parse_args(args))
    del options["json"]
    benchmark = options.pop("benchmark")
    if benchmark in ("branches", "latency", "train"):
        names, size = options["models"].split(","), f"model.image_size={options['image_size']}"
        options["models"] = [load_run(None, [f"model.name={name}", size]).model.name for name in names]
    # Torch and Ray take seconds to load.
    from vitray.bench import branches, finetune, ingest, networks, probes, train

    match benchmark:
        case "branches":
            return branches.measure_branches(**options)
        case "finetune":
            return finetune.measure_finetune(**options)
        case "ingest":
            return ingest.measure_ingest(**options)
        case "latency":
            return networks.measure_latency(**options)
        case "networks":
            return networks.measure_networks(**options)
        case _:
            if not options.pop("probes"):
                return train.measure_train(**options)
            del options["augment"], options["largest_batch"]
            return probes.measure_probes(**options)


def _counts(text: str) -> list[int]:
    return [count_up_to(10**6)(part) for part in text.split(",")]


def _modes(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text)  # not at the commas of a list


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all benchmarks."""
    parser = argparse.ArgumentParser(prog="vitray bench", description=__doc__, epilog=EXAMPLES)
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return benchmarks.add_parser(name, help=text, description=text)

    branches = add("branches", "Three things, Table 4: parallel branches in sequence, in a loop, fused, auto")
    branches.add_argument("--batches", type=_counts, default="1,2,4,8,16,32,64", help="images in a batch (%(default)s)")
    branches.add_argument("--train", action="store_true", help="forward and backward instead of inference")
    ingest = add("ingest", "the stream against a plain loop and other data loaders")
    ingest.add_argument("dataset", help="a dataset written by vitray shard")
    ingest.add_argument("--images", type=count_up_to(10**9), help="images in an epoch (all)")
    ingest.add_argument("--workers", type=count_up_to(10**6), default=2, help="decoding processes (%(default)s)")
    ingest.add_argument(
        "--augment", choices=POLICIES, help="compare the places of data.augment.on for a policy instead"
    )
    ingest.add_argument(
        "--object-store",
        type=count_up_to(10**7),
        metavar="MB",
        help="object store of the Ray started here (Ray's default)",
    )
    train = add("train", "a training step against plain PyTorch")
    others = train.add_mutually_exclusive_group()
    others.add_argument("--probes", action="store_true", help="the step alone against the step beside evaluate.probes")
    text = "the step on batches that the worker augments (data.augment.on: device) against the step on crops"
    others.add_argument("--augment", choices=POLICIES, help=text)
    finetune = add("finetune", "time and memory of fine-tuning modes")
    finetune.add_argument("--model", default="vit_ti12x1_16", help="a model name (%(default)s)")
    finetune.add_argument(
        "--modes",
        type=_modes,
        default="full,attn,ffn,head,attn+feedforward",
        help="MODE, MODE+RECOMPUTE or MODE:SETTING=VALUE, separated by commas, the reference first (%(default)s)",
    )
    finetune.add_argument("--batch", type=count_up_to(10**6), help="images in a batch (8 on a GPU, 1 on a CPU)")
    text = "networks side by side: size, multiply-adds, memory, speed (ViT paper, figure 13)"
    networks = add("networks", text)
    text = "NAME or NAME:SETTING=VALUE, separated by commas, the reference first (figure 13: %(default)s)"
    networks.add_argument("--models", type=_modes, default=FIGURE_13, help=text)
    networks.add_argument("--batch", type=count_up_to(10**6), default=8, help="images in a batch (%(default)s)")
    networks.add_argument("--train", action="store_true", help="forward and backward instead of inference")
    train.add_argument("--largest-batch", action="store_true", help="search the largest batch that fits a GPU")
    latency = add("latency", "the forward pass of small batches: eager, compiled, a CUDA graph")
    latency.add_argument("--batches", type=_counts, default="1,2,4,8,16,32,64", help="images in a batch (%(default)s)")
    for each in (branches, train, latency):
        each.add_argument("--models", default="vit_s18x2_16", help="model names, separated by commas (%(default)s)")
    for each in (branches, networks, train, latency):
        each.add_argument(
            "--compile",
            dest="compile_mode",
            nargs="?",
            choices=MODES,
            const="default",
            default=False,
            help="use torch.compile, in a mode of compute.compile",
        )
    for each in (branches, networks, train, latency, finetune):
        each.add_argument(
            "--dtype", choices=["fp32", "bf16"], default="fp32", help="precision; bf16 uses autocast (%(default)s)"
        )
        each.add_argument(
            "--seconds", type=number_up_to(3600), default=0.5, help="time of a variant in a round (%(default)s)"
        )
    for each in (ingest, train):
        each.add_argument("--batch", type=count_up_to(10**6), default=64, help="images in a batch (%(default)s)")
    for each in (branches, networks, ingest, train, latency, finetune):
        each.add_argument("--image-size", type=count_up_to(16_384), default=224, help="pixels of a side (%(default)s)")
        each.add_argument("--rounds", type=count_up_to(10_000), default=7, help="rounds (%(default)s)")
        each.add_argument("--out", type=Path, default=Path("bench_out"), help="folder of the results (%(default)s)")
    for each in (parser, branches, networks, ingest, train, latency, finetune):
        each.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    return parser


if __name__ == "__main__":
    raise SystemExit(run_verb(main))
