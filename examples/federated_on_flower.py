"""The whole road on Flower: prune a language model, fine-tune it with two partners, zeros kept.

Partners are processes with the pruned model, this file and text of their own, random and tiny here.
"""

import argparse
import os
import time
from pathlib import Path

from safetensors.torch import load_file
from tiny import tiny_model, tiny_tokens
from transformers import AutoModelForCausalLM, PreTrainedModel

from symprune import MaskSet, Recipe, prune
from symprune.fed import Dataset, text_data
from symprune.fed.flower import deploy
from symprune.fed.remote.job import TrainingJob

CODE = Path(__file__).resolve()


def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(os.environ["PRUNED_MODEL"])


def text(*seeds: int) -> Dataset:
    return text_data([tiny_tokens(seed=s) for s in seeds], length=32, test=tiny_tokens(seed=9))


first, second, public = (lambda: text(1)), (lambda: text(2)), (lambda: text(3, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description="Prune, then fine-tune on Flower.")
    parser.add_argument("--folder", type=Path, default=Path("out/on-flower"))
    dense, folder = tiny_model(), parser.parse_args().folder.resolve()
    base = folder / "pruned"
    masks = prune(dense, tiny_tokens(), Recipe("wanda", sparsity=0.5)).masks
    dense.save_pretrained(base)
    masks.save(base)
    os.environ["PRUNED_MODEL"] = str(base)
    problem = {"model": f"{CODE}:model", "data": f"{CODE}:public", "split": "user", "clients": 2}
    problem |= {"masks": str(base), "exempt": ["*embed*", "*norm*", "lm_head*"], "l2": 0.0}
    job = TrainingJob("fedavg", {"gamma": 0.3, "p": 0.5, "batch": 2}, problem, rounds=2)
    own = tuple({"model": f"{CODE}:model", "data": f"{CODE}:{n}"} for n in ("first", "second"))
    with deploy.running(deploy.Deployment(folder / "run", job, settings=own)) as running:
        running.submit()
        while not running.finished():
            time.sleep(1)
    tuned = model()
    tuned.load_state_dict(load_file(running.result.with_name("model.safetensors")), strict=False)
    moved = sum(not p.equal(tuned.get_parameter(name)) for name, p in dense.named_parameters())
    print(f"Flower trained {moved} matrices, {MaskSet.of(tuned).sparsity():.1%} of it zeros.")


if __name__ == "__main__":
    main()
