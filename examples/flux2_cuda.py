"""FLUX.2 klein on CUDA GPUs, tensor-parallel, from a shard set.

Once, on any machine:

    shardc build FLUX.2-klein-4B --tp 2 -o klein-tp2

Then, at every start:

    torchrun --nproc-per-node 2 examples/flux2_cuda.py klein-tp2 --prompt "a red fox in the snow"

`--device cpu` runs the same over gloo, for a machine without a GPU and a small model.
"""

from __future__ import annotations

import argparse
import os

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
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))

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
