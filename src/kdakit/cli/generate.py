"""Continue a text with a model that `kdakit train` made, byte by byte, as they come.

Takes the folder of a training run, or a safetensors file that kdakit.models.weights.save wrote.
"""

from __future__ import annotations

import codecs
import sys
import time
from pathlib import Path

from kdakit.measure.choices import UsageError


def add_arguments(parser) -> None:
    parser.add_argument("model", help="a folder of kdakit train, or a .safetensors file")
    parser.add_argument("--prompt", default="\n", help="the text to continue (default: a line break)")
    parser.add_argument("--tokens", type=int, default=400, metavar="N", help="bytes to generate (default: 400)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 takes the likeliest byte every time (default: 0.7)")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="draw among the N likeliest bytes only")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, gpu, tpu (default: the accelerator that is there)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the products (default: bfloat16 on an accelerator)")
    parser.add_argument("--framework", choices=("torch", "jax"), help="what to run with (default: torch where installed)")


def run(args) -> int:
    import numpy as np

    from kdakit.cli import demo, serving
    from kdakit.models import place
    from kdakit.models.generation import generate
    from kdakit.models.sampling import sampler

    prompt = args.prompt.encode("utf-8")
    if not prompt or args.tokens < 1 or not args.temperature >= 0:
        raise UsageError(f"--prompt must not be empty, --tokens at least 1, --temperature at least 0, "
                         f"got {args.prompt!r}, {args.tokens}, {args.temperature}")  # fmt: skip
    framework = args.framework or demo.default_framework()
    demo.check_installed(framework)
    try:
        where = place.find(framework, args.device, args.dtype)
    except ValueError as problem:
        raise UsageError(str(problem)) from problem
    config, arrays = read(args.model)
    if config.vocab_size != 256:
        raise UsageError(f"{args.model} must be a byte-level model with a vocabulary of 256, got {config.vocab_size}")
    if config.hidden_size <= 512 and "cpu" in str(where.device).lower():
        serving.use_one_thread(framework)
    model = serving.build(framework, config, arrays, where)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    sys.stdout.write(args.prompt)
    begin = time.perf_counter()
    tokens = np.frombuffer(prompt, np.uint8)[None].astype(np.int64)
    for token in generate(model, tokens, args.tokens, sampler(args.temperature, args.top_k, args.seed)):
        sys.stdout.write(decoder.decode(bytes([int(token[0])])))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")
    seconds = time.perf_counter() - begin
    kept = config.cache_bytes(len(prompt) + args.tokens) / 1024
    print(f"{args.tokens / seconds:,.0f} tokens/s with {framework} on {where}; {kept:,.0f} KiB kept between tokens", file=sys.stderr)
    return 0


def read(path: str):
    """Configuration and weights of a folder or a file."""
    from kdakit.models import weights
    from kdakit.training import checkpoint

    try:
        if Path(path).is_dir():
            found = checkpoint.load(path)
            return found.config, found.state.weights
        if not Path(path).exists():
            raise UsageError(f"{path} must be a folder of kdakit train or a .safetensors file; there is none of that name")
        return weights.load(path)
    except weights.WeightsError as problem:
        raise UsageError(str(problem)) from problem
