"""Which place of a transformers cache layer (5.24) a field of a cache spec stands for: the contract between families and engine.

A place is an attribute of the cache layer, and a key where the attribute is a dictionary of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Place(NamedTuple):
    attribute: str
    key: int | str | None = None

    def __str__(self) -> str:
        return self.attribute if self.key is None else f"{self.attribute}[{self.key!r}]"


KEYS, VALUES, INDEX = Place("keys"), Place("values"), Place("indexer_keys")
ENTRIES, INDEX_ENTRIES = Place("compressed_kv", "compressor"), Place("compressed_kv", "indexer")

PLACES: Mapping[str, Place] = MappingProxyType(
    {
        "k": KEYS,
        "v": VALUES,
        "latent": KEYS,
        "rope": VALUES,
        "kv": KEYS,  # values are the same tensor
        "index": INDEX,
        "conv": Place("conv_states", 0),
        "conv1": Place("conv_states", 1),
        "conv2": Place("conv_states", 2),
        "conv3": Place("conv_states", 3),
        "recurrent": Place("recurrent_states", 0),
        "entry": ENTRIES,
        "index_entry": INDEX_ENTRIES,
        "tail_kv": Place("buffer_kv", "compressor"),
        "tail_gate": Place("buffer_gate", "compressor"),
        "overlap_kv": Place("overlap_kv", "compressor"),
        "overlap_gate": Place("overlap_gate", "compressor"),
        "index_tail_kv": Place("buffer_kv", "indexer"),
        "index_tail_gate": Place("buffer_gate", "indexer"),
        "index_overlap_kv": Place("overlap_kv", "indexer"),
        "index_overlap_gate": Place("overlap_gate", "indexer"),
    }
)
