"""A model that stays on disk: a block is read when it is entered and let go when it is left.

Memory holds one block, or the parts around the blocks while text is embedded or scored. Blocks can
be read from other files than the rest: the same model before and after pruning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from symprune.checkpoint import parameter_names
from symprune.engine.permute.moves import Move, apply_moves
from symprune.errors import SympruneError
from symprune.machine import memory
from symprune.machine.compute import cast
from symprune.models.layout import find_layout


class Source(Protocol):
    """The tensors of a checkpoint, on disk."""

    def is_exact(self, name: str) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def read(self, name: str) -> Tensor: ...
    def prefetch(self, names: Iterable[str]) -> None: ...


class StreamedModel:
    """A causal LM without weights, and where they are."""

    def __init__(
        self,
        source: Source,
        config: Any,
        dtype: str = "auto",
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
        compute: torch.dtype | None = None,
    ) -> None:
        """dtype is the type the weights have, compute the one they are computed in, if another."""
        config = without_packing(config)
        if getattr(config, "quantization_config", None):
            raise SympruneError("The model is quantised; a model in 16 or 32 bits can be pruned.")
        self.source = source
        self.moves: list[Move] = []  # of what is read from `source`: the order it is pruned in
        self.dtype = stored_dtype(dtype, config, source)
        self.compute = compute or self.dtype
        self.device = torch.device(device)
        # What is fp32 by the model's own design stays so: it is told apart in a 16-bit model only.
        made = self.dtype if self.compute == torch.float32 else self.compute
        self.model = parameter_names.skeleton(config, made, trust_remote_code)
        self.layout = find_layout(self.model)
        types = parameter_names.Types(made, self.dtype, self.compute)
        self.names = parameter_names.Names(self.model, source, types)
        self.names.share(f"{self.layout.prefix}.")
        cast(self.model, made, self.compute)
        prefix = f"{self.layout.prefix}."
        self._around: list[str] = []
        self._of_block: list[list[str]] = [[] for _ in self.layout.blocks]
        for name in self.names.sources:
            if name.startswith(prefix):
                index = name.removeprefix(prefix).partition(".")[0]
                self._of_block[int(index)].append(name)
            else:
                self._around.append(name)
        self.place([self.device] * len(self))

    def __len__(self) -> int:
        return len(self.layout.blocks)

    def place(self, devices: Sequence[torch.device]) -> None:
        """Say on which device each block is computed."""
        self.devices = list(devices)
        for name, module in self.model.named_modules():
            device = self.device
            for index, block in enumerate(self.devices):
                if f"{name}.".startswith(f"{self.layout.prefix}.{index}."):
                    device = block
            for leaf, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[leaf] = buffer.to(device)

    def keys_of_block(self, index: int) -> list[str]:
        """The checkpoint's tensors that make a block."""
        return self.names.keys_of(self._of_block[index])

    @contextmanager
    def block(self, index: int, source: Source | None = None) -> Iterator[nn.Module]:
        """A block with its weights; the next one is fetched while this one is used."""
        source = source or self.source
        block = self.layout.blocks[index]
        try:
            self._load(source, self._of_block[index], self.devices[index])
            self._check_whole(block, f"{self.layout.prefix}.{index}.")
            if index + 1 < len(self):
                source.prefetch(self.keys_of_block(index + 1))
            yield block
        finally:
            parameter_names.release(self.model, self._names_in(f"{self.layout.prefix}.{index}."))
            memory.return_free_pages()

    @contextmanager
    def around(self, head: bool = False, source: Source | None = None) -> Iterator[None]:
        """The parts around the blocks with their weights, with or without the head."""
        source = source or self.source
        tied = getattr(self.model, "all_tied_weights_keys", {})
        wanted = self._around
        if not head and not tied:
            wanted = [name for name in wanted if not name.startswith(self._head())]
        try:
            self._load(source, wanted, self.device)
            if tied:
                self._tie_around()
            for name in self._names_around():
                if head or tied or not name.startswith(self._head()):
                    self._check_there(name)
            yield
        finally:
            parameter_names.release(self.model, self._names_around())
            memory.return_free_pages()

    def read(self, name: str, moves: Iterable[Move] = ()) -> Tensor:
        """A parameter as it is stored, in the order it is pruned in, and then moved."""
        return apply_moves([*self.moves, *moves], name, self.names.read(self.source, name))

    def moved(self, names: Iterable[str], moves: Iterable[Move] = ()) -> list[str]:
        """Those that are not in the order they are stored in."""
        there = {move.parameter_name for move in (*self.moves, *moves)}
        return [name for name in names if name in there]

    def names_of_block(self, index: int) -> list[str]:
        """The parameters and buffers of a block that the checkpoint has."""
        return self._of_block[index]

    def names_around(self) -> list[str]:
        """Those of no block."""
        return self._around

    def _load(self, source: Source, names: Iterable[str], device: torch.device) -> None:
        names = list(names)
        self.names.load(source, names, device)
        for name in self.moved(names) if source is self.source else ():
            apply_moves(self.moves, name, self.model.get_parameter(name).data)

    @property
    def at(self) -> torch.device:
        """Where the parts around the blocks are, and the first block."""
        return self.devices[0]

    @property
    def width(self) -> int:
        """The channels of the hidden states."""
        return int(self.model.get_input_embeddings().weight.shape[1])

    @property
    def block_size(self) -> int:
        """Bytes of the largest block, in the type it is computed in."""
        return max(
            sum(p.numel() * p.element_size() for p in block.parameters())
            for block in self.layout.blocks
        )

    def states_size(self, samples: int, seqlen: int) -> int:
        """Bytes of the hidden states."""
        return samples * seqlen * self.width * self.compute.itemsize

    def batch_size(self, seqlen: int) -> int:
        """How many samples should pass a block together."""
        return memory.batch_size(self.device, seqlen, self.width, self.compute)

    def load_all(self) -> Any:
        """The whole model in memory, as `from_pretrained` would have it."""
        for names, device in zip(self._of_block, self.devices, strict=True):
            self.names.load(self.source, names, device)
        self.names.load(self.source, self._around, self.device)
        missing = set(self.model.state_dict()) - set(self.names.sources)
        self.model.tie_weights(missing_keys=missing, recompute_mapping=False)
        for name in [name for name, _ in self.model.named_parameters()]:
            self._check_there(name)
        return self.model

    def _tie_around(self) -> None:
        """Share what is tied outside of the blocks; of those that share weights one may be there
        and another not."""
        tied, inside = self.model.all_tied_weights_keys, f"{self.layout.prefix}."
        missing = set(self.model.state_dict()) - set(self.names.sources)
        around = {name: of for name, of in tied.items() if not name.startswith(inside)}
        self.model.all_tied_weights_keys = around
        try:
            self.model.tie_weights(missing_keys=missing, recompute_mapping=False)
        finally:
            self.model.all_tied_weights_keys = tied

    def _names_in(self, prefix: str) -> list[str]:
        named = self.model.named_parameters(remove_duplicate=False)
        return [name for name, _ in named if name.startswith(prefix)]

    def _names_around(self) -> list[str]:
        inside = f"{self.layout.prefix}."
        named = self.model.named_parameters(remove_duplicate=False)
        return [name for name, _ in named if not name.startswith(inside)]

    def _head(self) -> str:
        """What the names of the head's parameters begin with."""
        head = self.model.get_output_embeddings()
        found = (name for name, module in self.model.named_modules() if module is head)
        return f"{next(found, '(none)')}."

    def _check_whole(self, block: nn.Module, prefix: str) -> None:
        for name, parameter in block.named_parameters():
            if parameter.is_meta:
                raise SympruneError(f"The checkpoint has no weights for {prefix}{name}.")

    def _check_there(self, name: str) -> None:
        if self.model.get_parameter(name).is_meta:
            raise SympruneError(f"The checkpoint has no weights for {name}.")


def without_packing(config: Any) -> Any:
    """The configuration of the plain model, where it says that a model is packed by symprune."""
    found = getattr(config, "quantization_config", None)
    if not isinstance(found, dict) or found.get("quant_method") != "symprune":
        return config
    plain = copy(config)
    del plain.quantization_config
    return plain


def stored_dtype(asked: str, config: Any, source: Source | None = None) -> torch.dtype:
    """As asked for, else as the configuration says, else as the first weights are."""
    if asked != "auto":
        return getattr(torch, asked)  # type: ignore[no-any-return]
    said = getattr(config, "dtype", None)
    if said is not None:
        return getattr(torch, said) if isinstance(said, str) else said  # type: ignore[no-any-return]
    stored = () if source is None else (source.dtype(name) for name in source)
    return next((dtype for dtype in stored if dtype.is_floating_point), torch.float32)
