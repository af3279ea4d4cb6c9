"""FLUX.2 klein on the NeuronCores of a Trainium instance, tensor-parallel, from a shard set.

Once, on any machine (no Neuron device or package is needed):

    shardc build FLUX.2-klein-4B --tp 8 --target trn2 -o klein-tp8

Then, at every start, where native TorchNeuron (torch-neuronx 2.13 or later) is installed:

    torchrun --nproc-per-node 8 examples/flux2_neuron.py klein-tp8 --prompt "a red fox in the snow"

It follows the public documents of TorchNeuron; it was not run on hardware.
"""

from __future__ import annotations

import argparse
from importlib import import_module

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardc.loaders import load_pipeline


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", help="the shard set of a whole pipeline")
    parser.add_argument("--prompt", default="a red fox in the snow")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--size", type=int, default=1024, help="of the square image, in pixels")
    parser.add_argument("--image", default="flux2.png")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    import_module("torch_neuronx")  # registers the device
    # Before anything touches the device: this gives each process its one core.
    dist.init_process_group("neuron")
    mesh = init_device_mesh("neuron", (dist.get_world_size(),))

    pipe = load_pipeline(args.out, mesh=mesh)

    image = pipe(
        prompt=args.prompt,
        num_inference_steps=args.steps,
        height=args.size,
        width=args.size,
        generator=torch.Generator("cpu").manual_seed(0),  # the same noise on every rank
    ).images[0]
    if dist.get_rank() == 0:
        image.save(args.image)
        print(args.image)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
