"""The model store: resolves model names to files on disk, which are downloaded once, verified and shared by all
commands. Does not import torch.

    from tokenmill.store import resolve_model
    resolve_model("smollm2:135m").path
"""

from tokenmill.store.catalog import DEFAULT_MODEL, CatalogEntry, find_entry, load_catalog
from tokenmill.store.created import copy_model, create_model, find_created, plain_name
from tokenmill.store.layout import Customization, Manifest, Store, StoredFile
from tokenmill.store.modelfile import Modelfile, parse_modelfile
from tokenmill.store.names import HubModel, LocalModel, is_model_name, is_scripted, parse_name
from tokenmill.store.progress import PullProgress, Silent
from tokenmill.store.pull import pull
from tokenmill.store.resolve import ResolvedModel, resolve_base, resolve_model

__all__ = [
    "DEFAULT_MODEL",
    "CatalogEntry",
    "Customization",
    "HubModel",
    "LocalModel",
    "Manifest",
    "Modelfile",
    "PullProgress",
    "ResolvedModel",
    "Silent",
    "Store",
    "StoredFile",
    "copy_model",
    "create_model",
    "find_created",
    "find_entry",
    "is_model_name",
    "is_scripted",
    "load_catalog",
    "parse_modelfile",
    "parse_name",
    "plain_name",
    "pull",
    "resolve_base",
    "resolve_model",
]
