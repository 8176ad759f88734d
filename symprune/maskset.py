"""Masks as artifacts: save, load, apply to another checkpoint, compare, keep through fine-tuning.

A `MaskSet` holds one bit per weight under the parameter's name, in the parameter's own layout, so
it fits any copy of the architecture however it was loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.machine import durable
from symprune.machine.checksums import checksum
from symprune.masks import count_true, pack_bits, unpack_bits
from symprune.validation import parse_json

FILE_NAME = "masks.safetensors"
LARGEST_SIZE = 2**40
PACKED = "packed.json"
"""What a folder has in which the masks are inside the packed weights."""


class MaskSet(Mapping[str, Tensor]):
    """Parameter name -> boolean keep-mask; packed to bits inside.

    A mask that is put in is packed where it is. What is on an accelerator is brought into main
    memory together, as soon as something is read, or by `fetch`.
    """

    def __init__(self) -> None:
        self._bits: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __getitem__(self, name: str) -> Tensor:
        return unpack_bits(self.bits(name), self._shapes[name])

    def __setitem__(self, name: str, keep: Tensor) -> None:
        self._bits[name] = pack_bits(keep)
        self._shapes[name] = tuple(keep.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._bits)

    def __len__(self) -> int:
        return len(self._bits)

    def __repr__(self) -> str:
        weights = sum(math.prod(shape) for shape in self._shapes.values())
        return f"MaskSet({len(self)} masks of {weights:,} weights)"

    def bits(self, name: str) -> Tensor:
        """A mask as it is stored: eight weights a byte, lowest bit first."""
        self.fetch()
        return self._bits[name]

    def fetch(self) -> None:
        """Bring into main memory what is on accelerators still, at once from each."""
        away: dict[torch.device, list[str]] = {}
        for name, bits in self._bits.items():
            if bits.device.type != "cpu":
                away.setdefault(bits.device, []).append(name)
        for names in away.values():
            together = torch.cat([self._bits[name] for name in names]).cpu()
            parts = together.split([self._bits[name].numel() for name in names])
            self._bits |= {name: part.clone() for name, part in zip(names, parts, strict=True)}

    def update(self, other: MaskSet) -> None:
        """Take over the masks of another set."""
        self._bits |= other._bits
        self._shapes |= other._shapes

    def sparsity(self, name: str | None = None) -> float:
        """Fraction pruned.

        Args:
            name: The parameter to look at; left out, all that have a mask.
        """
        names = list(self) if name is None else [name]
        size = sum(torch.Size(self._shapes[n]).numel() for n in names)
        kept = sum(int(count_true(self[n].flatten())) for n in names)
        return 1 - kept / size if size else 0.0

    def save(self, path: str | Path) -> None:
        """Write one safetensors file.

        Args:
            path: The file, or a folder, where it is called `masks.safetensors`.
        """
        self.fetch()
        durable.write_tensors(_file(path), self._bits, metadata(self._shapes))

    @classmethod
    def load(cls, path: str | Path) -> MaskSet:
        """Read what `save` wrote, or the masks inside a packed model.

        Args:
            path: The file, or the folder it is in.
        """
        from safetensors import SafetensorError, safe_open

        file, masks = _file(path), cls()
        if not file.exists() and (Path(path) / PACKED).is_file():
            return cls._from_packed(Path(path))
        try:
            with safe_open(file, framework="pt") as opened:
                shapes = parse_json((opened.metadata() or {}).get("shapes", "null"))
                if shapes is None:
                    raise SympruneError(f"{file} holds no masks.")
                for name, shape in shapes.items():
                    masks._bits[name] = opened.get_tensor(name)
                    masks._shapes[name] = _check_shape(name, shape, masks._bits[name])
        except FileNotFoundError as error:
            raise SympruneError(f"There are no masks at {file}.") from error
        except (SafetensorError, OSError, TypeError, AttributeError, RecursionError) as error:
            raise SympruneError(f"The mask file {file} is corrupt: {error}.") from error
        except ValueError as error:
            if isinstance(error, SympruneError):
                raise
            raise SympruneError(f"The mask file {file} is corrupt: {error}.") from error
        return masks

    @classmethod
    def _from_packed(cls, folder: Path) -> MaskSet:
        from safetensors import SafetensorError, safe_open

        from symprune.runtime import blob

        masks, plain = cls(), 0
        try:
            manifest = parse_json((folder / PACKED).read_text())
            about, checksums = manifest["masks"] or "{}", manifest["checksums"]
            said = parse_json(parse_json(about).get("__metadata__", {}).get("shapes", "{}"))
            shapes = {name: _read_shape(name, shape) for name, shape in said.items()}
            stored = {blob.packed_name(name): name for name in shapes}
            for file in sorted(folder.glob("*.safetensors")):
                with safe_open(file, framework="pt") as opened:
                    for key in opened.keys():  # noqa: SIM118 - not a mapping
                        if key not in stored:
                            plain += math.prod(opened.get_slice(key).get_shape())
                            continue
                        packed = opened.get_tensor(key)
                        if checksum(packed) != checksums[key]:
                            raise ValueError(f"the checksum of {key} does not match")
                        name, keep = stored[key], blob.keep_mask(packed)
                        if keep.numel() != math.prod(shapes[name]):
                            raise ValueError(f"{name} is packed in another shape")
                        masks[name] = keep.view(shapes[name])
            whole = {name: shapes[name] for name in shapes if name not in masks}
            if sum(map(math.prod, whole.values())) > plain:
                raise ValueError("there are more of them than weights")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise SympruneError(f"The masks in {folder} cannot be read: {error}.") from error
        except SafetensorError as error:
            raise SympruneError(f"A file of {folder} is corrupt: {error}.") from error
        for name, shape in whole.items():
            masks[name] = torch.ones(shape, dtype=torch.bool)
        return masks

    @classmethod
    def of(cls, model: nn.Module) -> MaskSet:
        """The masks a pruned model carries in its zeros.

        Args:
            model: A causal LM of transformers, in memory.
        """
        from symprune.models.layout import find_layout

        masks = cls()
        for matrix in find_layout(model).all_matrices():
            if matrix.parameter_name not in masks:
                masks[matrix.parameter_name] = matrix.parameter.data != 0
        return masks

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Set to zero in a model what these masks prune. Call it again to re-apply.

        Args:
            model: Any copy of the architecture the masks were made for.
        """
        parameters = dict(model.named_parameters())
        for name in self:
            if name not in parameters:
                raise SympruneError(f"The model has no parameter {name} for the mask.")
            if tuple(parameters[name].shape) != self._shapes[name]:
                raise SympruneError(
                    f"The mask of {name} is {self._shapes[name]}, "
                    f"the parameter {tuple(parameters[name].shape)}."
                )
        for name, keep in self.items():
            parameters[name].masked_fill_(~keep.to(parameters[name].device), 0)

    def check_fits(self, parameters: Mapping[str, Tensor]) -> None:
        """Fail where there is no mask of the right shape for one of these parameters.

        Args:
            parameters: Those that are to be pruned, by name.
        """
        for name, parameter in parameters.items():
            if name not in self._shapes:
                raise SympruneError(f"The masks are another model's: they have none for {name}.")
            if tuple(parameter.shape) != self._shapes[name]:
                raise SympruneError(
                    f"The masks are another model's: {name} is {tuple(parameter.shape)}, its mask "
                    f"{self._shapes[name]}."
                )

    def overlap(self, other: MaskSet) -> dict[str, float]:
        """Per parameter, the kept weights in common as a fraction of those kept by either.

        Args:
            other: Masks to compare with; parameters that only one has a mask for are left out.
        """
        result = {}
        for name in self:
            if name in other:
                mine, theirs = self[name], other[name]
                union = int(count_true((mine | theirs).flatten()))
                result[name] = int(count_true((mine & theirs).flatten())) / union if union else 1.0
        return result

    def trainer_callback(self) -> Any:
        """A transformers `TrainerCallback` that keeps zeros zero while fine-tuning."""
        from transformers import TrainerCallback

        masks = self

        class KeepZeros(TrainerCallback):
            """Re-applies the masks after every optimizer step."""

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                masks.apply(kwargs["model"])

        return KeepZeros()


def metadata(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """What a file of masks says about itself."""
    plain = json.dumps({name: list(shape) for name, shape in shapes.items()})
    return {"shapes": plain, "format": "symprune-masks"}


def _read_shape(name: str, shape: Any) -> tuple[int, ...]:
    """A mask's shape, if it is one."""
    sizes = shape if isinstance(shape, list) else [None]
    if not all(type(size) is int and 0 <= size <= LARGEST_SIZE for size in sizes):
        raise ValueError(f"the shape {shape!r} of {name} is not one")
    return tuple(sizes)


def _check_shape(name: str, shape: Any, bits: Tensor) -> tuple[int, ...]:
    """A mask's shape, if it is one and there are bits for it."""
    found = _read_shape(name, shape)
    if bits.dtype != torch.uint8 or bits.shape != ((math.prod(found) + 7) // 8,):
        raise ValueError(f"the bits of {name} do not make a mask of {shape}")
    return found


def _file(path: str | Path) -> Path:
    return Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
