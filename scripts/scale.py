"""Pruning models larger than memory, measured: `python scripts/scale.py flat` and `... seven`.

`flat` prunes models of 4, 8, 16 and 32 equal blocks and prints the peak of the resident memory
above what the interpreter and the imported libraries take. `seven` makes a checkpoint with the
shape of LLaMA2-7b (random weights, bf16, 13.5 GB), one tensor at a time, and prunes it under
`ulimit -d`, the limit of what a process may allocate. Files go to --folder and are removed
afterwards.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from symprune.shards import INDEX, OutputFile, make_header

SEVEN = {"hidden_size": 4096, "intermediate_size": 11008, "heads": 32, "blocks": 32, "vocab": 32000}
VOCAB = 16384
SHARD = 5 * 10**9
POOL = 2**22
DTYPE = torch.bfloat16
console = Console(width=110)


def config(hidden_size: int, intermediate_size: int, heads: int, blocks: int, vocab: int) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": blocks,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def tensors(about: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in the order of a LLaMA checkpoint."""
    width, inner, vocab = (about[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    yield "model.embed_tokens.weight", (vocab, width)
    for block in range(about["num_hidden_layers"]):
        at = f"model.layers.{block}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{at}.self_attn.{name}.weight", (width, width)
        yield f"{at}.mlp.gate_proj.weight", (inner, width)
        yield f"{at}.mlp.up_proj.weight", (inner, width)
        yield f"{at}.mlp.down_proj.weight", (width, inner)
        yield f"{at}.input_layernorm.weight", (width,)
        yield f"{at}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (vocab, width)


def make_checkpoint(folder: Path, about: dict) -> None:
    """Random weights, one tensor in memory at a time."""
    folder.mkdir(parents=True)
    shards: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = [[]]
    room = SHARD
    for name, shape in tensors(about):
        size = math.prod(shape) * DTYPE.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD
        shards[-1].append((name, DTYPE, shape))
        room -= size
    generator, places, total = torch.Generator().manual_seed(0), {}, 0
    pool = (0.02 * torch.randn(POOL, generator=generator)).to(DTYPE)
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        file = OutputFile(folder / name, make_header(shard, {"format": "pt"}))
        file.create()
        for tensor, _, shape in shard:
            file.write(tensor, random_weight(shape, pool, generator))
            places[tensor] = name
            total += math.prod(shape) * DTYPE.itemsize
        file.sync()
        file.close()
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index))
    make_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(about))


def random_weight(shape: tuple[int, ...], pool: Tensor, generator: torch.Generator) -> Tensor:
    """Ones for a norm; else normal numbers from the pool, in pieces that begin at random places."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=DTYPE)
    weight = torch.empty(math.prod(shape), dtype=DTYPE)
    for start in range(0, len(weight), POOL // 2):
        piece = weight[start : start + POOL // 2]
        begin = int(torch.randint(POOL - len(piece) + 1, (), generator=generator))
        piece.copy_(pool[begin : begin + len(piece)])
    return weight.view(shape)


def make_tokenizer(folder: Path) -> None:
    """A small byte-pair tokenizer; which tokens there are plays no part here."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, show_progress=False)
    made.train_from_iterator([topics["lambda"], topics["if"], topics["while"]], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")
    fast.save_pretrained(folder)


def resident(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def work(folder: Path, samples: int, seqlen: int, method: str) -> None:
    """Prune in this process; print what it took above the libraries, as JSON."""
    from symprune import Recipe, run

    tiny = config(64, 128, 4, 1, 512)
    shutil.rmtree(folder / "tiny", ignore_errors=True)
    make_checkpoint(folder / "tiny", tiny)
    recipe = Recipe(method=method, calibration="builtin", nsamples=samples, seqlen=seqlen)
    for name in ("tiny", "model"):  # the first makes Python import what it needs
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        job = run.Job(str(folder / name), recipe, folder / f"{name}-out", "auto", "cpu", False)
        record = run.prune(job)
    seconds = sum(record["seconds"].values())
    print(json.dumps({"peak": resident("VmHWM") - before, "seconds": seconds}))


def flat(
    folder: Path, depths: list[int], width: int, samples: int, seqlen: int, method: str
) -> None:
    """Peak memory of models that differ only in their depth."""
    inner = 11 * width // 4
    block = (4 * width * width + 3 * width * inner + 2 * width) * DTYPE.itemsize
    embeddings = VOCAB * width * DTYPE.itemsize
    hidden = samples * seqlen * width * DTYPE.itemsize
    unit = block + embeddings + hidden
    console.print(
        f"{method}, 50 %, {samples} x {seqlen} tokens, bf16; one block {block / 1e6:.1f} MB + "
        f"embeddings {embeddings / 1e6:.1f} MB + hidden states {hidden / 1e6:.1f} MB = "
        f"{unit / 1e6:.1f} MB"
    )
    table = Table("blocks", "model on disk", "peak above the libraries", "of the sum", "seconds")
    peaks = []
    for blocks in depths:
        shutil.rmtree(folder, ignore_errors=True)
        about = config(width, inner, width // 128, blocks, VOCAB)
        make_checkpoint(folder / "model", about)
        size = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
        options = ["--samples", str(samples), "--seqlen", str(seqlen), "--method", method]
        command = [sys.executable, __file__, "work", "--folder", str(folder), *options]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        peaks.append(found["peak"])
        table.add_row(
            str(blocks),
            f"{size / 1e6:.0f} MB",
            f"{found['peak'] / 1e6:.1f} MB",
            f"{found['peak'] / unit:.2f}",
            f"{found['seconds']:.1f}",
        )
        shutil.rmtree(folder)
    console.print(table)
    growth = 100 * (peaks[-1] / peaks[0] - 1)
    console.print(f"From {depths[0]} to {depths[-1]} blocks: {growth:+.1f} %")


def seven(folder: Path, cap: int, samples: int, seqlen: int, method: str) -> None:
    """A 7B-shaped model, pruned with less memory than it has weights."""
    start = time.monotonic()
    if not (folder / "model" / "config.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        make_checkpoint(folder / "model", config(**SEVEN))
    size = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    console.print(
        f"{size / 1e9:.2f} GB on disk, made in {time.monotonic() - start:.0f} s; "
        f"a process may allocate {cap / 1e9:.2f} GB (ulimit -d {cap // 1024})"
    )
    command = [
        sys.executable, "-m", "symprune", "prune", "--model", str(folder / "model"),
        "--method", method, "--sparsity", "0.5", "--calibration", "builtin",
        "--nsamples", str(samples), "--seqlen", str(seqlen), "--no-eval", "--device", "cpu",
        "--output", str(folder / "out"), "--log", str(folder / "log.jsonl"),
    ]  # fmt: skip
    shown = ["symprune", *command[3:]]
    console.print("$ " + " ".join(Path(part).name if "/" in part else part for part in shown))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))

    done = subprocess.run(command, check=False, preexec_fn=limit, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    console.print(f"exit code 0; peak resident memory {peak / 1e9:.2f} GB, of {size / 1e9:.2f} GB")
    for line in (folder / "log.jsonl").read_text().splitlines()[-2:]:
        console.print(line, soft_wrap=True, highlight=False)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("what", choices=["flat", "seven", "work"])
    options.add_argument("--folder", type=Path, default=Path("out/scale"))
    options.add_argument("--blocks", type=int, nargs="+", default=[4, 8, 16, 32])
    options.add_argument("--width", type=int, default=2048, help="of the models of `flat`")
    options.add_argument("--samples", type=int, default=4)
    options.add_argument("--seqlen", type=int, default=64)
    options.add_argument("--method", default="ria")
    options.add_argument("--cap", type=float, default=4.0, help="GB (10^9 bytes)")
    given = options.parse_args()
    if given.what == "work":
        work(given.folder, given.samples, given.seqlen, given.method)
    elif given.what == "flat":
        sizes = (given.blocks, given.width, given.samples, given.seqlen)
        flat(given.folder, *sizes, given.method)
    else:
        seven(given.folder, int(given.cap * 1e9), given.samples, given.seqlen, given.method)
        shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
