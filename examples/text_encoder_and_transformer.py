"""Both big models of FLUX.2 klein sharded, one after the other: the encoder makes room.

Once, on any machine; with no --component, every component that has a manifest is sharded:

    shardc build FLUX.2-klein-4B --tp 2 -o klein-tp2

Then, at every start (`--device cpu` for a machine without a GPU and a small model):

    torchrun --nproc-per-node 2 examples/text_encoder_and_transformer.py klein-tp2

A rank never holds its parts of both: the prompt is encoded, the encoder goes, then the transformer
is loaded. `load_pipeline` (flux2_cuda.py) keeps both, which is what a server wants.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from torch.distributed.device_mesh import init_device_mesh

from shardc.loaders import load_model


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

    from_pretrained: Any = DiffusionPipeline.from_pretrained

    encoder = load_model(args.out, mesh=mesh, component="text_encoder")
    pipe = from_pretrained(args.out, text_encoder=encoder, transformer=None, vae=None)
    with torch.no_grad():
        embeds, _ = pipe.encode_prompt(args.prompt)
    del encoder, pipe

    transformer = load_model(args.out, mesh=mesh, component="transformer")
    pipe = from_pretrained(
        args.out, text_encoder=None, tokenizer=None, transformer=transformer, torch_dtype="auto"
    )
    pipe.vae.to(embeds.device)
    image = pipe(
        prompt_embeds=embeds,
        num_inference_steps=args.steps,
        height=args.size,
        width=args.size,
        guidance_scale=1.0,  # no negative prompt: there is nothing left to encode it with
        generator=torch.Generator("cpu").manual_seed(0),  # the same noise on every rank
    ).images[0]
    if dist.get_rank() == 0:
        image.save(args.image)
        print(args.image)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
