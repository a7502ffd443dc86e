"""The model store: model names to files on disk, pulled once, verified, shared by all commands. Does not import torch.

from tokenmill.store import resolve_model
resolve_model("smollm2:135m").path
"""

from tokenmill.store.catalog import DEFAULT_MODEL, CatalogEntry, find_entry, load_catalog
from tokenmill.store.layout import Manifest, Store, StoredFile
from tokenmill.store.names import HubModel, LocalModel, is_model_name, parse_name
from tokenmill.store.progress import PullProgress, Silent
from tokenmill.store.pull import pull
from tokenmill.store.resolve import ResolvedModel, resolve_model

__all__ = [
    "DEFAULT_MODEL",
    "CatalogEntry",
    "HubModel",
    "LocalModel",
    "Manifest",
    "PullProgress",
    "ResolvedModel",
    "Silent",
    "Store",
    "StoredFile",
    "find_entry",
    "is_model_name",
    "load_catalog",
    "parse_name",
    "pull",
    "resolve_model",
]
