"""`tokenmill create`: derive a model from another one with a Modelfile in Ollama's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tokenmill.cli.output import PullScreen
from tokenmill.errors import InvalidRequest
from tokenmill.lora.sizes import adapter_size
from tokenmill.store import Store, create_model, parse_modelfile, resolve_base
from tokenmill.store.modelfile import MAX_MODELFILE_CHARACTERS


def command(name: str, /, *, file: Annotated[Path, Parameter(alias="-f")] = Path("Modelfile")) -> int:
    """Create a model from another one, with its own adapter, system prompt, parameters, messages or chat template.

    Parameters
    ----------
    name
        Name of the new model.
    file
        The Modelfile: FROM, ADAPTER, SYSTEM, PARAMETER, MESSAGE, TEMPLATE (Jinja), LICENSE.
    """
    from tokenmill.server.ollama.options import require_options

    modelfile = parse_modelfile(_read(file))
    require_options(modelfile.parameters)
    if modelfile.adapter:
        modelfile.adapter = str((file.parent / Path(modelfile.adapter).expanduser()).resolve())
        adapter_size(Path(modelfile.adapter))  # refuses a file that is not an adapter
    base = modelfile.base
    path = (file.parent / base).expanduser()
    if base.startswith((".", "/", "~")) or base.endswith(".gguf"):
        base = str(path)
    store = Store()
    with PullScreen() as screen:
        found = resolve_base(base, store, screen)
    created = create_model(store, name, found, modelfile.customization)
    print(f"{created.name}  {created.source}")
    return 0


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > 4 * MAX_MODELFILE_CHARACTERS:
            raise InvalidRequest(f"{file} is too large for a Modelfile")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InvalidRequest(f"{file} can't be read: {problem}", param="file") from problem
