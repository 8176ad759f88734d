"""What a card says of loading: the one part that is different for a plain and a packed folder, so
that packing exchanges it, and unpacking gives the first text back to the byte."""

from __future__ import annotations

BEGIN, END = "<!-- symprune: load -->", "<!-- symprune: end -->"
LIBRARIES = {False: "library_name: transformers\n", True: "library_name: symprune\n"}
PLAIN = """
The folder is a plain checkpoint: transformers loads it, symprune need not be installed.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER_OR_NAME", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_NAME")
```

It takes as much memory as the dense model, since zeros are stored like other numbers.
`symprune pack FOLDER PACKED` writes a smaller one that runs from its packed weights.
"""
PACKED = """
The weights are packed: with symprune installed and imported, transformers loads them, keeps them
packed in memory and multiplies from there.

```python
import symprune  # makes transformers know the format
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER_OR_NAME", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_NAME")
```

`symprune unpack FOLDER PLAIN` writes the plain checkpoint, which loads without symprune.
"""
SECTIONS = {False: f"{BEGIN}{PLAIN}{END}", True: f"{BEGIN}{PACKED}{END}"}


def change_form(card: str, packed: bool) -> str:
    """The card for the other form of the same weights. One that somebody has rewritten there is
    left as it is."""
    section, library = SECTIONS[not packed], LIBRARIES[not packed]
    if card.count(section) != 1:
        return card
    front, line, rest = card.partition(library)
    if line and "\n---\n" not in front:
        card = front + LIBRARIES[packed] + rest
    return card.replace(section, SECTIONS[packed])
